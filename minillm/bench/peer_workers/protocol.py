"""How a peer in another process is asked to work: one JSON object a line, answered by one line. Standard library only.

{"load": {...}}                                   -> {"loaded": {"version": ..., "how": {...}}}
{"run": {"prompts": [[id, ...], ...], "new_tokens": [n, ...]}}  -> {"tokens": [[id, ...], ...], "seconds": s}
Any fault -> {"error": text}. The end of the input ends the worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(make: Callable[[dict[str, Any]], tuple[Any, dict[str, Any]]]) -> None:
    """make(load) returns (engine, about). engine.prepare(prompts, new_tokens) is not timed, engine.run(...) is.

    What a peer prints must not get between the lines: the real output moves to a descriptor of its own, and
    descriptor 1 becomes the log.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine: Any = None
    answer: dict[str, Any]
    for line in sys.stdin:
        try:
            message = json.loads(line)
            if "load" in message:
                engine, about = make(message["load"])
                answer = {"loaded": about}
            else:
                prompts, new_tokens = message["run"]["prompts"], message["run"]["new_tokens"]
                engine.prepare(prompts, new_tokens)
                start = time.perf_counter()
                tokens = engine.run(prompts, new_tokens)
                answer = {"seconds": time.perf_counter() - start, "tokens": tokens}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
