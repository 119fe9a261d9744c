"""Packaging: what is declared is what is there, and the wheel works from an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower()


def declared() -> dict[str, str]:
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    return {name_of(r): r for group in groups for r in group if name_of(r) != "minillm"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))


def test_every_dependency_is_pinned_and_within_its_range():
    from packaging.requirements import Requirement

    for name, text in declared().items():
        requirement = Requirement(text)
        assert name in pins(), f"{name} is in pyproject.toml but not in constraints.txt"
        assert requirement.specifier.contains(pins()[name]), f"{text} does not admit the pinned {pins()[name]}"


def test_constraints_hold_exact_versions_without_local_labels():
    for name, version in pins().items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), (name, version)


def test_environment_yml_installs_the_same():
    text = (ROOT / "environment.yml").read_text()
    assert f"python{PROJECT['project']['requires-python']}" in text
    assert "-c constraints.txt" in text
    assert "-e .[dev]" in text
    installed = set(re.findall(r"^\s*- (\S.*)$", text, flags=re.M))
    assert installed == {"conda-forge", "python>=3.11", "pip", "pip:", "-c constraints.txt", "-e .[dev]"}


def test_the_makefile_installs_the_same():
    assert "install -c constraints.txt -e '.[dev]'" in (ROOT / "Makefile").read_text()


def test_every_package_of_the_tree_is_in_the_wheel_list():
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "minillm").rglob("__init__.py")}
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == found | {"minillm.kernels"}
    assert PROJECT["tool"]["setuptools"]["package-dir"]["minillm.kernels"] == "kernels"


@pytest.mark.model
def test_the_wheel_generates_from_an_empty_folder(tmp_path):
    """`pip wheel .`, unpacked away from the checkout: the command answers with the embedded model."""
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("minillm-*.whl")
    home = tmp_path / "installed"
    install = [*pip, "install", "--no-deps", "-q", "--target", str(home), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    assert sorted(p.name for p in home.iterdir() if not p.name.endswith(".dist-info")) == ["bin", "minillm"]
    empty = tmp_path / "empty"
    empty.mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(home)!r}); import minillm, minillm.kernels; "
        f"assert minillm.__file__.startswith({str(home)!r}), minillm.__file__; from minillm.cli import main; "
        "sys.exit(main(['generate', 'What is the capital of France?', '--max-tokens', '16']))"
    )
    env = os.environ | {"PYTHONPATH": str(home)}
    done = subprocess.run([sys.executable, "-c", code], cwd=empty, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
