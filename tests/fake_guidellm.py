"""guidellm as `bench agree` sees it, without guidellm: the same arguments, real requests, a report of its form.

FAKE_GUIDE in the environment makes it "fail", or leave a request "incomplete".
"""

import itertools
import json
import os
import sys
import time

from minillm.trace.client import calls, load


def options(argv):
    """{"--backend": {"kind": ...}, ...}"""
    pairs = itertools.pairwise(argv)
    return {a: dict(p.partition("=")[::2] for p in b.split(",")) for a, b in pairs if a.startswith("--") and "=" in b}


def main(argv):
    assert argv[:3] == ["-m", "guidellm", "run"], argv
    mode = os.environ.get("FAKE_GUIDE")
    if mode == "fail":
        print("loading")
        print("no such backend", file=sys.stderr)
        return 3
    o = options(argv)
    data, count = o["--data"], int(o["--constraint"]["count"])
    assert int(data["prompt_tokens_min"]) <= int(data["prompt_tokens"]) <= int(data["prompt_tokens_max"])
    work = calls(
        [0.0] * count, prompt_tokens=int(data["prompt_tokens"]), max_tokens=int(data["output_tokens"]),
        seed=int(o["--seed"]["value"]), extra={"ignore_eos": True},
    )  # fmt: skip
    found = load(o["--backend"]["target"], work, concurrency=int(o["--profile"]["streams"]))
    shift = time.time() - time.perf_counter()
    rows = [report(s, shift) for s in found]
    lost = [rows.pop()] if mode == "incomplete" else []
    page = {
        "metadata": {"guidellm_version": "0.0-fake"},
        "benchmarks": [{"requests": {"successful": rows, "errored": [], "incomplete": lost, "total": None}}],
    }
    with open(o["--output"]["path"], "w", encoding="utf-8") as file:
        json.dump(page, file)
    return 0


def report(s, shift):
    stamps = {
        "resolve_start": s.sent + shift, "request_start": s.sent + shift, "first_token_iteration": s.first + shift,
        "last_token_iteration": s.chunks[-1][0] + shift, "request_end": s.end + shift,
    }  # fmt: skip
    return {
        "request_id": "its own", "response_id": s.request_id, "info": {"status": "completed", "timings": stamps},
        "input_metrics": {"total_tokens": s.prompt_tokens}, "output_metrics": {"total_tokens": s.output_tokens},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
