"""How many connections the limit of open files leaves. Lesson 13.

A connection is an open file, and a process may have so many (`ulimit -n`, often 1,024). At that limit nothing is
accepted any more, not even a probe of /health, and asyncio logs it once for each place in its backlog, again every
second. So the limit is raised where it may be, the bound of connections lies below it, and those that would take the
last files are cut off.
"""

from __future__ import annotations

import contextlib
import math

from minillm.errors import MinillmError

CONNECTIONS = 1024  # unless told otherwise
FEWEST = 64
EXTRA = 64  # connections beyond max_connections that there is always room for: they are told so, or probe /health
ROOM = 8192  # and so many more, where the limit may be raised for them
AT_ONCE = 64  # connections that asyncio accepts in one turn of its loop
TURNS = 4  # of the loop, from then until one that is cut off is closed
OWN = 128  # files of the process itself: of libraries, of the loop, of a cache on disk, of traces
SPARE = EXTRA + TURNS * AT_ONCE + OWN


def most_connections(asked: int | None) -> int:
    """What `max_connections` is in this process, whose limit of open files is raised for it where that is allowed.

    Raises MinillmError if more were asked for than the limit leaves.
    """
    needed = (CONNECTIONS if asked is None else asked) + SPARE
    return bounded(asked, _raised(needed + ROOM, needed))


def cut_off_beyond(most: int) -> float:
    """How many connections leave the files that a process needs, where `most` of them are served; inf without a limit.

    Until then a probe is answered. Silent connections beyond `most` are closed soon, but more may come meanwhile.
    """
    limit = _raised()
    return math.inf if limit is None else max(most + EXTRA, limit - TURNS * AT_ONCE - OWN)


def bounded(asked: int | None, limit: int | None) -> int:
    """The same for a limit of so many open files; None if there is none."""
    if limit is None:
        return CONNECTIONS if asked is None else asked
    if asked is None:
        return min(CONNECTIONS, max(FEWEST, limit - SPARE))
    if asked > max(FEWEST, limit - SPARE):
        raise MinillmError(
            f"max_connections {asked} needs {asked + SPARE} open files, and this process may have {limit} (ulimit -n); "
            f"ask for at most {max(FEWEST, limit - SPARE)}, or raise the limit"
        )
    return asked


def _raised(*wanted: int) -> int | None:
    """The limit, raised to the first of `wanted` that the system allows. None: no limit is known."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    for most in wanted:
        if soft != endless and soft < most:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == endless else min(most, hard), hard))
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == endless else soft
