"""guidellm as a second client: its command, and its report as `Stamps`, so that one definition serves both. Lesson 13.

It runs in the Python of its own environment. What it stamps, on the wall clock (time.time), where its terms differ from
those of trace/latency.py:

request_start         before the headers are written, its connection open; ours is before the connection is opened
first_token_iteration, last_token_iteration   a line of the stream with text has been read
request_end           [DONE] has been read
its "ITL"             (last token - first token) / (tokens - 1) of a request: that is vLLM's TPOT, and ours
its "TPOT"            (last token - request_start) / tokens, TTFT in it: not used here

It has no stamp for each token, so gaps between tokens cannot be told from its report. Its tables of TPOT and ITL weigh
a request by its tokens; here each request counts once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError
from minillm.trace.latency import Stamps

NAME = "guidellm"
PATIENCE = 600.0  # seconds for one run: it loads for ten of them and more
# Offline: the tokenizer is a folder. One process for its users, not one each: every one would load for seconds.
SETTINGS = {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}


def python_of(peer: str | None) -> str | None:
    """`guidellm=PYTHON` of --peer: that Python; without "=" this one. None where no peer is named."""
    if peer is None:
        return None
    name, _, python = peer.partition("=")
    if name != NAME:
        raise MinillmError(f"--peer of agree is {NAME}=PYTHON, the Python of its environment; got {peer!r:.80}")
    return python or sys.executable


def command(
    python: str, url: str, folder: str | Path, out: str | Path, *, users: int, requests: int, prompt: tuple[int, int],
    new: int, seed: int,
) -> list[str]:  # fmt: skip
    """Closed loop of `users`, prompts of prompt[0] to prompt[1] tokens, `new` tokens each; the report goes to `out`."""
    low, high = prompt
    lengths = f"prompt_tokens={(low + high) // 2},prompt_tokens_stdev={max(1, (high - low) // 4)}"
    return [
        python, "-m", NAME, "run",
        "--backend", f"kind=openai_http,target={url},request_format=/v1/completions",
        "--profile", f"kind=concurrent,streams={users}",
        "--constraint", f"kind=max_requests,count={requests}",
        "--tokenizer", f"kind=huggingface_auto,model={folder}",
        "--data", f"kind=synthetic_text,{lengths},prompt_tokens_min={low},prompt_tokens_max={high},output_tokens={new}",
        "--seed", f"kind=static,value={seed}",
        "--output", f"kind=json,path={out}",
        "--disable-progress",
    ]  # fmt: skip


def load(python: str, url: str, folder: str | Path, **work: Any) -> tuple[list[Stamps], str]:
    """One run: stamps of its requests, and its version. work: as for `command`. Raises MinillmError with its words."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "report.json"
        try:
            done = subprocess.run(
                command(python, url, folder, out, **work), env=environment | SETTINGS, cwd=scratch,
                capture_output=True, text=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
        except OSError as error:
            raise MinillmError(f"{NAME}: {python} cannot be started ({error.strerror}); give its Python") from None
        except subprocess.TimeoutExpired:
            raise MinillmError(f"{NAME} was not over after {PATIENCE:.0f} s") from None
        if done.returncode or not out.exists():
            said = done.stderr if done.stderr.strip() else done.stdout
            words = [line.strip() for line in said.splitlines() if line.strip()]
            raise MinillmError(f"{NAME} ended with code {done.returncode}: {words[-1][:300] if words else 'no word'}")
        return read(out.read_text(encoding="utf-8"))


def read(text: str) -> tuple[list[Stamps], str]:
    """A JSON report: stamps of all its requests as they were sent, and the version that wrote it.

    `chunks` of these stamps are two: the first token, and the last with all others. What guidellm leaves out of its
    statistics (warm-up, cool-down) is not left out here. Raises MinillmError for requests that failed, and for a
    report of another form.
    """
    try:
        report = json.loads(text)
        version = str(report["metadata"]["guidellm_version"])
        (run,) = report["benchmarks"]
        groups = run["requests"]
        lost = len(groups.get("errored") or ()) + len(groups.get("incomplete") or ())
        found = [_stamps(r) for r in groups["successful"] or ()]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise MinillmError(f"{NAME}'s report has another form ({type(error).__name__}: {error})") from None
    if lost or not found:
        raise MinillmError(f"{lost} requests of {NAME} failed or were cut short, {len(found)} were answered")
    return sorted(found, key=lambda s: s.sent), version


def _stamps(request: dict[str, Any]) -> Stamps:
    t, tokens = request["info"]["timings"], int(request["output_metrics"]["total_tokens"])
    first, last = float(t["first_token_iteration"]), float(t["last_token_iteration"])
    chunks = ((first, 1), (last, tokens - 1)) if tokens > 1 else ((first, 1),)
    sent = float(t["request_start"])
    return Stamps(
        sent, sent, chunks, float(t["request_end"]), int(request["input_metrics"]["total_tokens"]), tokens, 200,
        request_id=str(request["response_id"]),
    )  # fmt: skip
