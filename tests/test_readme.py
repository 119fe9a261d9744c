"""README makes no claim without a record."""

from __future__ import annotations

import re
import shutil

from minillm.course import readme
from minillm.course.lab import root

TEXT = (root() / "README.md").read_text(encoding="utf-8")


def test_readme_shows_what_the_records_give():
    assert readme.faults(root()) == []


def test_a_changed_number_and_a_stale_picture_are_seen(tmp_path):
    (tmp_path / "docs").mkdir()
    shutil.copy(root() / readme.PICTURE, tmp_path / readme.PICTURE)
    changed = re.sub(r"(-->)[\d.]+(<!-- /)", r"\g<1>99.9\2", TEXT, count=1)
    assert changed != TEXT
    (tmp_path / "README.md").write_text(changed, encoding="utf-8")
    assert len(readme.faults(tmp_path)) == 1
    (tmp_path / readme.PICTURE).unlink()
    assert len(readme.faults(tmp_path)) == 2


def test_every_number_with_a_unit_stands_beside_its_record():
    plain = re.sub(r"<!--\s*\{\{.*?\}\}\s*-->.*?<!--\s*/\s*-->", "", TEXT, flags=re.S)
    plain = re.sub(r"```.*?```", "", plain, flags=re.S)
    assert not re.findall(r"\d[\d.,]*\s*(?:ms|us|µs|tok(?:en)?s?/s|GB/s|TB/s|GFLOP/s|times|x\b|×|%)", plain)


def test_commands_come_first_and_links_resolve():
    assert TEXT.index("make lab") < TEXT.index("make test") < TEXT.index("## ")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT):
        assert (root() / target).exists(), target
