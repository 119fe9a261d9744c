"""A run in numbers: every fate counted once, latency and its tails, goodput; the table of `minillm load`. Lesson 13."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from minillm.trace.latency import BOUNDS, SLO, Stamps, by_length, duration, goodput, summarize

REJECTED = (429, 503)


def report(stamps: Sequence[Stamps], slo: SLO | None = None, bounds: Sequence[int] = BOUNDS) -> dict[str, Any]:
    """Plain data. Times in seconds, as latency.py defines them, of the requests that were answered to their end.

    TTFT and E2E are there twice: from when a request was sent, and from when it was due, as goodput counts.
    """
    ok, seconds = [s for s in stamps if s.ok], duration(stamps)
    rejected = [s for s in stamps if s.status in REJECTED]
    left = [s for s in stamps if s.cancelled and s.status not in REJECTED]
    rate = lambda count: count / seconds if seconds > 0 else 0.0
    faults = Counter(
        s.error if s.error is not None and s.status in (200, None) else f"status {s.status}"
        for s in stamps
        if not s.ok and not (s.cancelled and s.status == 200 and s.error is None)
    )
    found: dict[str, Any] = {
        "requests": {
            "sent": len(stamps), "ok": len(ok), "rejected": len(rejected), "cancelled": len(left),
            "failed": len(stamps) - len(ok) - len(rejected) - len(left),
        },
        "seconds": seconds,
        "requests_per_s": rate(len(ok)),
        "prompt_tokens": sum(s.prompt_tokens or 0 for s in ok),
        "output_tokens": sum(s.tokens for s in ok),
        "output_tokens_per_s": rate(sum(s.tokens for s in ok)),
        "retry_after_s": sorted(s.retry_after_s for s in stamps if s.retry_after_s is not None),
        "errors": dict(faults),
    }  # fmt: skip
    if slo is not None:
        found["slo"] = {k: v for k, v in asdict(slo).items() if v is not None and k != "reason"}
        found["goodput_rps"] = goodput(stamps, slo, seconds)
    plain = lambda values: None if (s := summarize(values)) is None else asdict(s)
    found |= {name: plain(getattr(s, name) for s in ok) for name in ("ttft", "tpot", "e2e", "lateness")}
    found["itl"] = plain(gap for s in ok for gap in s.itl)
    due = [s.from_schedule() for s in ok]
    found |= {f"{name}_from_schedule": plain(getattr(s, name) for s in due) for name in ("ttft", "e2e")}
    found["ttft_by_prompt"] = {name: plain(s.ttft for s in group) for name, group in by_length(ok, bounds).items()}
    return found


def show(report: Mapping[str, Any]) -> str:
    """A report as a table, times in milliseconds."""
    r = report["requests"]
    lines = [
        f"{r['sent']} requests in {report['seconds']:.2f} s: {r['ok']} ok, {r['rejected']} rejected, "
        f"{r['cancelled']} cancelled, {r['failed']} failed",
        f"{report['requests_per_s']:.2f} requests/s, {report['output_tokens_per_s']:.1f} output tokens/s",
    ]
    if "slo" in report:
        bounds = ", ".join(f"{k.removesuffix('_s').upper()} {v:g} s" for k, v in report["slo"].items()) or "none"
        lines.append(f"goodput {report['goodput_rps']:.2f} requests/s within {bounds}")
    if waits := report["retry_after_s"]:
        lines.append(f"Retry-After on {len(waits)} refusals: {waits[0]:g} to {waits[-1]:g} s")
    lines += [f"error on {count}: {words}" for words, count in report["errors"].items()]
    lines.append(f"{'':<26}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}  ms")
    names = {
        "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "ttft_from_schedule": "TTFT from schedule",
        "e2e_from_schedule": "E2E from schedule", "lateness": "sent late by",
    }  # fmt: skip
    rows = [(name, report[key]) for key, name in names.items()]
    buckets = report["ttft_by_prompt"]
    rows += [(f"TTFT, prompt {name}", s) for name, s in buckets.items()] if len(buckets) > 1 else []
    for name, s in rows:
        numbers = "".join(f"{1e3 * s[k]:>10.1f}" for k in ("mean", "p50", "p95", "p99", "max")) if s else f"{'-':>10}"
        lines.append(f"{name:<26}{numbers}")
    return "\n".join(lines)
