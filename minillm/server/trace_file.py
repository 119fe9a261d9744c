"""A file of JSON lines that a full disk, or one that is taken away, cannot spoil. Lesson 13.

A write that fails may leave half a line. The next one that succeeds begins on a line of its own, so that half a line is
all that is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

MAX_BYTES = 64 * 2**20


class TraceFile:
    """Appended to; readable by its owner alone. At max_bytes it is moved to "<path>.1", in place of an older one.

    Raises OSError if it cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES):
        self.path, self.max_bytes = path, max_bytes
        self._torn = False  # the last write failed and may have left half a line
        self._file: TextIO | None = self._open()

    def write(self, line: str) -> None:
        """Append a line, ended by a line break. Raises OSError or ValueError; the next one opens the file again."""
        try:
            if self._file is None:
                self._file = self._open()
            if self._file.tell() and self._file.tell() + len(line) > self.max_bytes:
                self.close()
                os.replace(str(self.path), f"{self.path}.1")
                self._file = self._open()
            self._file.write(("\n" if self._torn else "") + line)
            self._file.flush()
            self._torn = False
        except (OSError, ValueError):
            self._torn = True
            self.close()
            raise

    def _open(self) -> TextIO:
        handle = os.open(str(self.path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        file = os.fdopen(handle, "a", encoding="ascii")
        file.seek(0, os.SEEK_END)
        return file

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk refuses again what is still buffered
                self._file.close()
        self._file = None


def read_traces(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a file, oldest first. Half a line, which a full disk leaves, is passed by."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record
