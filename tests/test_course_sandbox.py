"""The guards of the grading sandbox: what each refuses by itself; each attack works where there is no guard."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minillm.course import audit, landlock, session
from minillm.course import notebook as nbk
from minillm.course.checks import load_lesson
from minillm.course.grade import grade_file
from minillm.course.session import Limits

ROOT = Path(__file__).parents[1]
FULL_00 = sum(t.points for t in load_lesson("00").tasks)


def with_first(tmp_path: Path, source: str, text: str, alone: bool = False):
    """Exercise 00 of `source` with `text` as the cell after the set-up; `alone`: without any other cell, so that no
    stub overwrites what it defines and no check cell has kept one."""
    nb = nbk.read(ROOT / source / "00_roofline.ipynb")
    at = next(i for i, c in enumerate(nb["cells"]) if c["id"] == "setup") + 1
    nb["cells"] = [*nb["cells"][:at], nbk.code("extra", text), *([] if alone else nb["cells"][at:])]
    path = tmp_path / "00_roofline.ipynb"
    nbk.write(path, nb)
    return path


# Cheats on files. Each is tried against each guard alone, and must succeed when there is none.
REFERENCE = ROOT / "minillm/course/checks/lesson_00.py"
TAKE = """
import ast, __future__
for node in ast.parse(text).body:  # one by one: what cannot be imported here is left out
    try: exec(compile(ast.Module([node], []), "x", "exec", __future__.annotations.compiler_flag), globals())
    except Exception: pass
"""
ANY = ("landlock", "audit")
READS = {
    "open": (ANY, "text = open({ref!r}).read()"),
    "a copy elsewhere": (ANY, "text = open({copy!r}).read()"),
    "a symbolic link": (ANY, "import os; os.symlink({ref!r}, 'x'); text = open('x').read()"),
    "a folder's descriptor": (
        ANY,
        "import os; f = os.open({root!r}, os.O_RDONLY)\n"
        "text = open(os.open('minillm/course/checks/lesson_00.py', os.O_RDONLY, dir_fd=f)).read()",
    ),
    "an open folder's descriptor": (  # one that may be read; the way up from it looks like one inside scratch
        ANY,
        "import os, sys; f = os.open(sys.base_prefix, os.O_RDONLY)\n"
        "up = os.path.relpath(os.path.realpath({ref!r}), os.path.realpath(sys.base_prefix))\n"
        "deep = '/'.join(['d'] * (up.count('..') + 1)); os.makedirs(deep); os.chdir(deep)\n"
        "text = open(os.open(up, os.O_RDONLY, dir_fd=f)).read()",
    ),
    "a shell": (ANY, "import subprocess; text = subprocess.check_output(['cat', {ref!r}], text=True)"),
    "the solutions": (
        ANY,
        "import json; cells = json.load(open({solutions!r}))['cells']\n"
        "text = '\\n'.join(''.join(c['source']) for c in cells if 'task-' in c['id'])",
    ),
    "torch": (
        ANY,
        "import os, torch; n = os.path.getsize({ref!r})\n"
        "text = bytes(torch.from_file({ref!r}, size=n, dtype=torch.uint8).tolist()).decode()",
    ),
    "torch's storage": (
        ANY,
        "import os, torch; n = os.path.getsize({ref!r})\n"
        "text = bytes(torch.UntypedStorage.from_file({ref!r}, False, n).tolist()).decode()",
    ),
    "native code": (
        ("landlock",),
        "import ctypes, os; text = os.fdopen(ctypes.CDLL(None).open({ref!r}.encode(), 0)).read()",
    ),
}
FOLDER = "import os, time; f = os.open({victim!r}, os.O_RDONLY)\n"
DEEDS = {
    "writes": (ANY, "open({victim!r} + '/new', 'w')"),
    "writes by a descriptor": (ANY, FOLDER + "os.open('new', os.O_WRONLY | os.O_CREAT, dir_fd=f)"),
    "removes by a descriptor": (ANY, FOLDER + "os.remove('kept', dir_fd=f)"),
    "renames by a descriptor": (ANY, FOLDER + "os.rename('kept', 'new', src_dir_fd=f, dst_dir_fd=f)"),
    "makes a folder by a descriptor": (ANY, FOLDER + "os.mkdir('new', dir_fd=f)"),
    "links": (ANY, "import os; os.symlink('/', {victim!r} + '/new')"),
    "makes a device": (ANY, "import os; os.mkfifo({victim!r} + '/new')"),
    "makes a database": (ANY, "import sqlite3; sqlite3.connect({victim!r} + '/new').execute('create table t (x)')"),
    "changes rights": (("audit",), "import os; os.chmod({victim!r} + '/kept', 0)"),
    "changes rights by a descriptor": (("audit",), FOLDER + "os.chmod('kept', 0, dir_fd=f)"),
    "runs a program by a fresh fork_exec": (
        ANY,
        "import os, sys; sys.modules.pop('_posixsubprocess', None)\n"
        "from multiprocessing.util import spawnv_passfds\n"
        "os.waitpid(spawnv_passfds({touch!r}, [b'touch', os.fsencode({victim!r} + '/new')], []), 0)",
    ),
    "signals by a descriptor of a process": (
        ANY, "import os, signal; signal.pidfd_send_signal(os.pidfd_open({pid}), signal.SIGKILL)"
    ),
    "writes by native code": (
        ("landlock",), "import ctypes; ctypes.CDLL(None).creat(({victim!r} + '/new').encode(), 384)"
    ),
}  # fmt: skip
ROOMY = Limits(total_s=300, cell_s=120, memory_mb=2048)  # importing torch alone may take long on a busy machine


def landlock_version() -> int:
    return landlock.version(ctypes.CDLL(None, use_errno=True))


def against(table: dict) -> list:
    """(name, guards): every guard of this machine alone, and none."""
    here = ANY if landlock_version() >= 6 else ("audit",)
    return [(n, g) for n, (stop, _) in table.items() for g in [*((s,) for s in stop if s in here), ()]]


def name(value) -> str:
    return value if isinstance(value, str) else "+".join(value) or "no guard"


@pytest.mark.parametrize(("how", "guards"), against(READS), ids=name)
def test_references_cannot_be_read(tmp_path, monkeypatch, how, guards):
    monkeypatch.setattr(session, "GUARDS", guards)
    copy = tmp_path / "copy.py"
    shutil.copy(REFERENCE, copy)
    text = READS[how][1].format(
        ref=str(REFERENCE), copy=str(copy), root=str(ROOT), solutions=str(ROOT / "solutions/00_roofline.ipynb")
    )
    graded = grade_file(with_first(tmp_path, "exercises", text + TAKE, alone=True), ROOMY)
    assert graded.sandbox == name(guards).removeprefix("no guard") or not guards
    assert (graded.points == 0) if guards else (graded.points >= 10), graded.as_dict()


@pytest.mark.parametrize(("deed", "guards"), against(DEEDS), ids=name)
def test_nothing_outside_changes(tmp_path, monkeypatch, deed, guards):
    monkeypatch.setattr(session, "GUARDS", guards)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("x")
    (victim / "kept").chmod(0o600)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        touch = str(shutil.which("touch")).encode()
        text = DEEDS[deed][1].format(victim=str(victim), pid=other.pid, touch=touch)
        graded = grade_file(with_first(tmp_path, "solutions", text), ROOMY)
        assert graded.points == FULL_00, graded.problems

        def same():
            names = [p.name for p in victim.iterdir()]
            return names == ["kept"] and (victim / "kept").stat().st_mode & 0o777 == 0o600 and other.poll() is None

        end = time.monotonic() + (0 if guards else 60)  # whom a signal ended has ended when the kernel got to it
        while same() and time.monotonic() < end:
            time.sleep(0.01)
        assert same() == bool(guards), (list(victim.iterdir()), graded.problems)
    finally:
        other.kill()
        other.communicate()


def test_the_hook_refuses_folder_descriptors_whatever_opened_them(tmp_path, monkeypatch):
    """`os.open` of a folder is refused before; this is for a descriptor that came another way."""
    monkeypatch.chdir(tmp_path)
    watch = audit.hook([], [], str(tmp_path))
    events = {
        "os.remove": ("a",), "os.rename": ("a", "b"), "os.rmdir": ("a",), "os.mkdir": ("a", 0o700),
        "os.link": ("a", "b"), "os.symlink": ("a", "b"), "os.chmod": ("a", 0),
        "os.chown": ("a", 0, 0), "os.utime": ("a", None, None),
    }  # fmt: skip
    for event, args in events.items():
        watch(event, (*args, -1))
        with pytest.raises(PermissionError, match="cannot change"):
            watch(event, (*args, 5))


def test_an_installed_course_is_cut_out_of_its_packages(tmp_path):
    """Landlock's rules only add: beside the course every package stays readable, the course in the midst does not."""
    for part in ("torch/a.py", "minillm/course/b.py"):
        (tmp_path / part).parent.mkdir(parents=True)
        (tmp_path / part).touch()
    (tmp_path / "alias").symlink_to(tmp_path / "minillm")
    rules = dict(landlock.open_parts(str(tmp_path), [str(tmp_path / "minillm")]))
    both = landlock.READ_FILE | landlock.READ_DIR
    assert rules == {str(tmp_path): landlock.READ_DIR, str(tmp_path / "torch"): both}
