"""The page at /: nothing from another host, a chat that streams and stops, a timeline that keeps tenants apart."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from chromium import browser, wait_until
from server_life import held, web

from minillm import AsyncLLM
from minillm.events import Event
from minillm.server.local import LocalServer
from minillm.server.page import FILES, STATIC, Timeline


@pytest.fixture(scope="module")
def server(embedded_folder):
    with AsyncLLM(
        embedded_folder, dtype="float32", max_model_len=512, threads=1, scheduling_policy="priority"
    ) as llm, LocalServer(llm, served_model_name="smol") as server:  # fmt: skip
        yield server


def test_the_page_comes_from_this_server_alone(server):
    for path, (name, kind) in FILES.items():
        got = web.get(server.url + path)
        assert got.status_code == 200
        assert got.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in got.headers["content-security-policy"]
        assert got.content == (STATIC / name).read_bytes()
        assert not re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", got.text), "it names another host"


def test_chat_in_a_browser(server, tmp_path):
    with browser(tmp_path / "profile") as page:
        page.open(server.url + "/")
        page.until("document.getElementById('state').textContent === 'ready'")
        assert page.evaluate("document.getElementById('model').textContent") == "smol, context 512"
        ask = """(text, tokens, streams) => {
            const set = (id, value) => { document.getElementById(id).value = value; };
            set('text', text); set('max_tokens', tokens); set('streams', streams);
            document.getElementById('form').requestSubmit();
        }"""
        page.evaluate(f"({ask})('What is the capital of France?', 16, 3)")
        page.until("!document.getElementById('send').disabled")
        answer = page.evaluate("document.querySelector('.message.assistant').firstChild.nodeValue")
        assert answer == "The capital of France is Paris."
        note = page.evaluate("document.querySelector('.message.assistant small').textContent")
        assert re.fullmatch(r"\d+ tokens in \(\d+ cached\), 8 out, first after [\d.]+ m?s, [\d.]+ m?s in all", note)
        assert page.evaluate("document.getElementById('count').textContent") == "8"
        for number in ("ttft", "rate", "itl50", "itlmax", "e2e"):
            assert re.fullmatch(r"[\d.]+( ms| s)?", page.evaluate(f"document.getElementById('{number}').textContent"))
        page.until("steps.length > 0 && mine.size === 3")
        page.until("steps.flatMap((s) => s.rows).filter(([id]) => ours(id)).length >= 3 * 8")
        # Stop is a cancel: the engine has nothing left to do.
        with held(server) as engine:
            page.evaluate(f"({ask})('Write a very long story about the sea.', 400, 1)")
            shown = "Number(document.getElementById('count').textContent) >= 2"
            engine.until(lambda: page.evaluate(shown), "it is being answered")
            page.evaluate("document.getElementById('stop').click()")
            page.until("!document.getElementById('send').disabled")
        assert "stopped" in page.evaluate(
            "[...document.querySelectorAll('.message.assistant small')].at(-1).textContent"
        )
        page.until("Number(document.getElementById('running').textContent) === 0")
        # An answer of 3 pieces in 2 s that had 7 tokens: its rate is not that of 7 stamps.
        stamps = """(() => { const s = new Stamps(); s.piece(); s.piece(); s.piece(); s.first = 10; s.last = 12;
            const before = s.rate; s.tokens = 7; s.show();
            return [before, s.rate, document.getElementById('count').textContent]; })()"""
        assert page.evaluate(stamps) == [1.0, 1.0, "7"]
        page.evaluate(
            "steps.splice(0, steps.length, {rows: [['a', 3, 0]], others: 2}, {rows: [['b', 1, 3]], others: 0})"
        )
        assert page.evaluate("steps.map((s) => drawn(s).length)") == [2, 1]
        page.evaluate("draw()")
        assert page.complaints == []
    # The engine hears of a client that left between two steps.
    wait_until(lambda: not server.state.llm.core.outputs, "what was stopped has left the engine")


def test_a_browser_is_told_what_is_wrong(embedded_folder, server, tmp_path):
    with (
        LocalServer(server.state.llm, api_key="sk-for-the-page", served_model_name="smol") as closed,
        browser(tmp_path / "profile") as page,
    ):
        page.open(closed.url + "/")
        page.until("document.getElementById('state').textContent === 'this server needs an API key'")
        page.evaluate("key.value = 'sk-for-the-page'; key.dispatchEvent(new Event('change'))")
        page.until("document.getElementById('state').textContent === 'ready'")


def step(rows):
    data = {"rows": rows, "seconds": 0.1, "waiting": 0, "running": len(rows), "free": 1, "cached": 0, "live": 1}
    return Event(0, 1.0, "step", "", data)


def two_tenants():
    timeline = Timeline()
    for name, tenant in (("a1", "ann"), ("b1", "bob"), ("b2", "bob")):
        timeline.follow(Event(0, 0.0, "queued", name, {"tenant": tenant, "prompt_tokens": 3}))
    timeline.follow(step([["a1", 3, 0], ["b1", 1234, 4321], ["b2", 1, 5678]]))
    timeline.follow(step([["b1", 1, 5555]]))
    return timeline


def test_a_tenant_sees_its_own_requests_and_only_that_others_exist():
    timeline = two_tenants()
    shown = timeline.since(0, "ann")
    assert [(s["rows"], s["others"]) for s in shown["steps"]] == [([["a1", 3, 0]], 2)]
    assert shown["next"] == 2, "what it may not see is not asked for again"
    assert timeline.since(shown["next"], "ann") == {"next": 2, "steps": []}
    everything = timeline.since(0)
    assert [len(s["rows"]) for s in everything["steps"]] == [3, 1]
    assert {s["others"] for s in everything["steps"]} == {0}


def test_nothing_of_others_lengths_and_cache_hits_comes_out():
    """D7. Neither the lengths in their rows, nor the blocks that they hold or found."""
    numbers = lambda shown: set(re.findall(r"\d{4}", json.dumps(shown)))
    assert not numbers(two_tenants().since(0, "ann"))
    assert numbers(two_tenants().since(0)) == {"1234", "4321", "5678", "5555"}, "the numbers that must be hidden"
    for shown in two_tenants().since(0, "ann")["steps"]:
        assert not {"free", "cached", "live"} & set(shown)


def test_a_key_sees_over_http_what_its_tenant_may(server, tmp_path):
    file = tmp_path / "tenants.toml"
    names = {"ann": "", "bob": "", "root": "admin = true"}
    file.write_text(
        "".join(f'[tenants.{n}]\nkeys = ["sk-key-of-{n}-0123456789"]\n{more}\n' for n, more in names.items())
    )
    with LocalServer(server.state.llm, tenants=file) as closed:
        head = lambda name: {"Authorization": f"Bearer sk-key-of-{name}-0123456789"}
        ask = {"prompt": "one two three", "max_tokens": 3, "ignore_eos": True}
        done = httpx.post(closed.url + "/v1/completions", headers=head("bob"), json=ask, timeout=60)
        assert done.status_code == 200
        steps = {n: web.get(closed.url + "/timeline", headers=head(n)).json()["steps"] for n in names}
        theirs = lambda name: [row for s in steps[name] for row in s["rows"]]
        assert steps["ann"] == []
        assert len(theirs("bob")) >= 3
        assert {tuple(row) for row in theirs("bob")} <= {tuple(row) for row in theirs("root")}
        assert web.get(closed.url + "/timeline").status_code == 401


def test_a_timeline_forgets():
    timeline = Timeline(max_steps=8)
    for i in range(2000):
        timeline.follow(Event(0, 0.0, "queued", f"r{i}", {"tenant": "ann", "prompt_tokens": 3}))
        timeline.follow(step([[f"r{i}", 3, 0]]))
    assert len(timeline._tenants) <= 8 + 256
    assert len(timeline.since(0)["steps"]) == 8


@pytest.mark.parametrize("since", ["-1", "x", "9" * 30, "1.5"])
def test_a_bad_cursor_is_told(server, since):
    got = web.get(server.url + "/timeline", params={"since": since})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "since")


def test_a_page_that_outlives_its_server_goes_on():
    timeline = Timeline()
    timeline.follow(step([["r", 3, 0]]))
    assert timeline.since(700)["next"] == 1
    assert len(timeline.since(700)["steps"]) == 1
