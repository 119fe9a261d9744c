"""The load client in a process of its own: what it costs is then not the server's. Lesson 13.

In a notebook that holds the server too, a client in the same process shares Python's lock with it, and both look slow.

>>> stamps = load_apart(server.url, calls(poisson(100, 5.0), prompt_tokens=64, max_tokens=32))

time.perf_counter is one clock for all processes of a machine, so these stamps stand beside those of the engine.
Requests are due from when the process has begun.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from minillm.errors import MinillmError
from minillm.trace import latency
from minillm.trace.client import Call, load
from minillm.trace.latency import Stamps


def load_apart(
    url: str, calls: Sequence[Call], *, concurrency: int | None = None, wait_s: float | None = None, **client: Any
) -> list[Stamps]:  # fmt: skip
    """As `client.load`, in another process. wait_s: seconds after which it is ended, and MinillmError raised."""
    job = {"url": url, "calls": [asdict(c) for c in calls], "options": {"concurrency": concurrency, **client}}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "minillm.trace.apart"], input=json.dumps(job), capture_output=True, text=True,
            timeout=wait_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise MinillmError(
            f"the load was not over after {wait_s:g} s; give it fewer requests, or wait longer"
        ) from None
    if done.returncode:
        last = done.stderr.strip().splitlines()
        raise MinillmError(f"the client's process ended with code {done.returncode}: {last[-1] if last else 'no word'}")
    return latency.from_jsonl(done.stdout)


def main() -> int:
    job = json.load(sys.stdin)
    try:
        stamps = load(job["url"], [Call(**c) for c in job["calls"]], **job["options"])
    except MinillmError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.write(latency.to_jsonl(stamps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
