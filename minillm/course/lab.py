"""`make lab`: JupyterLab at the first lesson, wherever it is started: as root, without a display, offline."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from minillm.cli import Parser, answer
from minillm.errors import MinillmError

FIRST = "notebooks/00_roofline.ipynb"


def root() -> Path:
    """The checkout that holds the lessons; the installed package alone has none."""
    return Path(__file__).resolve().parents[2]


def lesson_files() -> list[Path]:
    """The lessons of this checkout, in order; empty when minillm was installed as a wheel."""
    return sorted((root() / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def free_port(port: int, tries: int = 50) -> int:
    """`port`, or the next one that nobody listens on."""
    if not 1 <= port <= 65535:
        raise MinillmError(f"port must be from 1 to 65535, got {port}; choose one with make lab PORT=...")
    for candidate in range(port, min(port + tries, 65536)):
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", candidate))
                return candidate
            except OSError:
                continue
    raise MinillmError(f"no free port from {port} to {min(port + tries, 65536) - 1}; choose one with make lab PORT=...")


def has_display() -> bool:
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def jupyter_environment() -> dict[str, str]:
    """`labconfig/` beside this file turns off what JupyterLab would ask the network for, and ask the learner about."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    return os.environ | {"JUPYTER_CONFIG_PATH": os.pathsep.join(paths)}


def jupyter_command(folder: Path, port: int) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--notebook-dir={folder}",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        f"--LabApp.default_url=/lab/tree/{FIRST}",
    ]
    command += [] if has_display() else ["--no-browser"]
    # Jupyter refuses root unless told; in a container root is the usual user, and it listens on loopback only.
    command += ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return command


def main() -> int:
    """Replace this process by JupyterLab, or return 2 when that cannot be done."""
    parser = Parser(prog="python -m minillm.course.lab", description=__doc__)
    parser.add_argument("--port", type=int, default=8888)
    args = parser.parse_args()
    return answer(lambda: start(args.port))


def start(wanted: int) -> int:
    if not (root() / FIRST).is_file():
        raise MinillmError(f"{FIRST} is not in {root()}; run this from a clone of the repository")
    port = free_port(wanted)
    if port != wanted:
        print(f"Port {wanted} is taken; using {port}.")
    print(f"JupyterLab is starting on port {port}; its URL, with the token, follows. Ctrl-C stops it.", flush=True)
    command = jupyter_command(root(), port)
    return os.execve(command[0], command, jupyter_environment())  # does not return


if __name__ == "__main__":
    sys.exit(main())
