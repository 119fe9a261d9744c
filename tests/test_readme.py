"""README, and the page about other engines, make no claim without a record."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from minillm.course import readme
from minillm.course.lab import root

TEXT = (root() / "README.md").read_text(encoding="utf-8")


def test_texts_show_what_the_records_give():
    assert readme.faults(root()) == []


@pytest.mark.parametrize("name", readme.TEXTS)
def test_a_changed_number_and_a_stale_picture_are_seen(name, tmp_path):
    (tmp_path / "docs").mkdir()
    for copied in (*readme.TEXTS, readme.PICTURE):
        shutil.copy(root() / copied, tmp_path / copied)
    text = (root() / name).read_text(encoding="utf-8")
    changed = re.sub(r"(-->)[\d.]+(<!-- /)", r"\g<1>99.9\2", text, count=1)
    assert changed != text
    (tmp_path / name).write_text(changed, encoding="utf-8")
    assert readme.faults(tmp_path) == [f"{name} shows a number that its record does not give"]
    (tmp_path / readme.PICTURE).unlink()
    assert len(readme.faults(tmp_path)) == 2


@pytest.mark.parametrize("name", readme.TEXTS)
def test_every_number_with_a_unit_stands_beside_its_record(name):
    text = (root() / name).read_text(encoding="utf-8")
    plain = re.sub(r"<!--\s*\{\{.*?\}\}\s*-->.*?<!--\s*/\s*-->", "", text, flags=re.S)
    plain = re.sub(r"```.*?```", "", plain, flags=re.S)
    assert not re.findall(r"\d[\d.,]*\s*(?:ms|us|µs|tok(?:en)?s?/s|GB/s|TB/s|GFLOP/s|times|x\b|×|%)", plain)


def test_commands_come_first():
    assert TEXT.index("make lab") < TEXT.index("make test") < TEXT.index("## ")


PAGES = [Path("README.md"), Path("CONTRIBUTING.md"), *(p.relative_to(root()) for p in (root() / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_resolve(page):
    """Files are there, and so is the heading that a link names."""
    text = (root() / page).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", text):
        path = (root() / page).parent / target if target else root() / page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, anchor
