"""Run the kernel tests on several Triton versions: `make triton-matrix`, or this file with versions: `3.6.0 3.9.0`.

Each version is unpacked beside the installed one, without its dependencies, and put in front of the path. Not part of
`make test`: it needs a package index and some minutes a version.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
HERE = Path(__file__).parent
OTHERS = ("test_triton_private.py", "test_attention_conformance.py")
TESTS = [*sorted(HERE.glob("test_kernels_*.py")), *(HERE / name for name in OTHERS)]


def fetch(version: str) -> Path:
    folder = HERE.parent / "build" / f"triton-{version}"
    if not (folder / "triton").is_dir():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), f"triton=={version}"], check=True)
    return folder


def run(version: str) -> tuple[int, str]:
    env = os.environ | {"PYTHONPATH": str(fetch(version)), "OMP_NUM_THREADS": "1"}
    seen = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"], env=env, capture_output=True, text=True
    ).stdout.strip()
    if seen != version:
        return 1, f"asked for Triton {version}, got {seen!r}"
    command = [sys.executable, "-m", "pytest", "-o", "addopts=-q --strict-markers", *map(str, TESTS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=HERE.parent)
    if done.returncode:
        print(done.stdout[-6000:])
    closing = [line for line in done.stdout.splitlines() if re.search(r"\d+ (passed|failed)", line)]
    return done.returncode, closing[-1].strip("= ") if closing else done.stderr[-300:]


def main(versions: list[str]) -> int:
    worst = 0
    for version in versions or VERSIONS:
        code, line = run(version)
        print(f"triton {version}: {line}", flush=True)
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
