"""`make lab`: a page that answers, on a free port, as any user, without a display."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from minillm.course import lab


def test_a_taken_port_gives_the_next_one():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        taken = s.getsockname()[1]
        assert lab.free_port(taken) != taken


def test_no_browser_without_a_display_and_root_is_allowed(monkeypatch, tmp_path):
    monkeypatch.setattr(lab, "has_display", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    command = lab.jupyter_command(tmp_path, 8888)
    assert "--no-browser" in command
    assert "--allow-root" in command
    monkeypatch.setattr(lab, "has_display", lambda: True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    command = lab.jupyter_command(tmp_path, 8888)
    assert "--no-browser" not in command
    assert "--allow-root" not in command


def read_when_it_answers(url: str, end: float) -> bytes:
    """The URL is printed a moment before the port is open."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as page:
                return page.read()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")
def test_the_page_answers_and_the_server_stops():
    port = lab.free_port(18888)
    command = [sys.executable, "-m", "minillm.course.lab", "--port", str(port)]
    env = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        url = None
        end = time.monotonic() + 300
        while url is None and time.monotonic() < end:
            line = server.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/lab/tree/notebooks/00_roofline\.ipynb\?token=\w+", line)
            url = found and found[0]
        assert url, "no URL was printed"
        assert f":{port}/" in url
        assert b"JupyterLab" in read_when_it_answers(url, end)
        settings = "lab/api/settings/@jupyterlab/apputils-extension:notification"
        news = read_when_it_answers(re.sub(r"lab/tree/[^?]*", settings, url), end)
        assert json.loads(news)["schema"]["properties"]["fetchNews"]["default"] == "false", "nobody is asked for news"
    finally:
        server.terminate()
        assert server.wait(120) is not None
