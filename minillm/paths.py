"""Where minillm keeps what it fetches and measures."""

from __future__ import annotations

import os
from pathlib import Path

from minillm.errors import MinillmError


def cache_dir() -> Path:
    """`$MINILLM_CACHE`, else `$XDG_CACHE_HOME/minillm`, else `~/.cache/minillm`. Made when missing.

    Raises MinillmError when it cannot be made.
    """
    try:
        if own := os.environ.get("MINILLM_CACHE"):
            path = Path(own)
        else:
            path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minillm"
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder is known
        raise MinillmError(f"the cache folder cannot be made ({error}); set MINILLM_CACHE to a folder") from None
    return path
