"""Where minillm keeps what it fetches and measures."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$MINILLM_CACHE`, else `$XDG_CACHE_HOME/minillm`, else `~/.cache/minillm`. Made when missing."""
    if own := os.environ.get("MINILLM_CACHE"):
        path = Path(own)
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minillm"
    path.mkdir(parents=True, exist_ok=True)
    return path
