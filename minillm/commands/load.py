"""`minillm load`: what users of a running server feel under a load, defined as `vllm bench serve` does. Lesson 13."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from minillm.commands import command


def add_parser(sub: Any) -> None:
    parser = command(
        sub,
        "load",
        "Send requests to an OpenAI-style server, stamp every token, and print TTFT, TPOT, ITL and goodput.",
        "minillm load --url http://127.0.0.1:8000 --rate 2 --requests 100 --slo chat",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1 (default: %(default)s)")
    add("--model", help="its name there (default: the first that the server names)")
    add("--api-key", help="sent as a bearer token")
    add("--chat", action="store_true", help="ask /v1/chat/completions instead of /v1/completions")
    add("--requests", type=int, default=100, help="how many (default: %(default)s)")
    add("--rate", help="open loop: requests a second; inf sends all at once (default: 1)")
    add("--arrivals", help="constant, poisson, bursty or ramp (default: poisson)")
    add("--cv", type=float, help="bursty: deviation of the gaps over their mean (default: 2)")
    add("--last-rate", type=float, help="ramp: the rate at its end (default: twice --rate)")
    add("--concurrency", type=int, help="closed loop instead: so many users, each waits for its answer")
    add("--prompt-tokens", default="64", help="N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MOST], 0.9*64+0.1*2000")
    add("--max-tokens", default="64", help="of the answers, in the same forms (default: %(default)s)")
    add("--eos", action="store_true", help="let answers end by themselves; without it ignore_eos is sent")
    add("--cancel", type=float, default=0.0, help="share of clients that leave half-way (default: %(default)s)")
    add("--slo", help="chat, rag, agent, batch, or bounds in seconds as ttft=0.5,tpot=0.05")
    add("--timeout", type=float, default=600.0, help="seconds for one request (default: %(default)s)")
    add("--seed", type=int, default=0, help="of arrivals, lengths and prompts (default: %(default)s)")
    add("--out", metavar="FILE", help="write the raw stamps there, one request a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """1 when no request was answered to its end."""
    from minillm.errors import MinillmError
    from minillm.trace import arrivals, client, latency
    from minillm.trace.report import report, show

    if not 1 <= args.requests <= 1_000_000:
        raise MinillmError(f"--requests must be a whole number from 1 to 1000000, got {args.requests}")
    if args.concurrency is not None and args.rate is not None:
        raise MinillmError("--rate is an open loop and --concurrency a closed one: give one of them")
    if args.concurrency is not None and args.concurrency < 1:
        raise MinillmError(f"--concurrency must be at least 1, got {args.concurrency}")
    if not 0 <= args.cancel <= 1:
        raise MinillmError(f"--cancel must be a share from 0 to 1, got {args.cancel}")
    if not args.timeout > 0:
        raise MinillmError(f"--timeout must be seconds above 0, got {args.timeout}")
    try:
        rate = float(args.rate or 1.0)
    except ValueError:
        raise MinillmError(f"--rate must be a number or inf, got {args.rate!r}") from None
    together = args.concurrency is not None or rate == math.inf
    for name, holds, owner in (
        ("arrivals", not together, "an open loop with a finite --rate"),
        ("cv", args.arrivals == "bursty", "--arrivals bursty"),
        ("last_rate", args.arrivals == "ramp", "--arrivals ramp"),
    ):
        if getattr(args, name) is not None and not holds:
            raise MinillmError(f"--{name.replace('_', '-')} belongs to {owner}; here it would be ignored")
    slo = latency.slo(args.slo) if args.slo else None
    n, seed = args.requests, args.seed
    if together:
        times = [0.0] * n
    else:
        cv = 2.0 if args.cv is None else args.cv
        times = arrivals.make(args.arrivals or "poisson", n, rate, cv=cv, last=args.last_rate, seed=seed)
    calls = client.calls(
        times, prompt_tokens=arrivals.lengths(n, args.prompt_tokens, seed + 1),
        max_tokens=arrivals.lengths(n, args.max_tokens, seed + 2), chat=args.chat, seed=seed, cancel=args.cancel,
    )  # fmt: skip
    stamps = client.load(
        args.url, calls, concurrency=args.concurrency, progress=not args.json, model=args.model, api_key=args.api_key,
        timeout_s=args.timeout, extra={} if args.eos else {"ignore_eos": True},
    )  # fmt: skip
    if args.out:
        Path(args.out).write_text(latency.to_jsonl(stamps), encoding="utf-8")
    found = report(stamps, slo)
    print(json.dumps(found) if args.json else show(found))
    return 0 if found["requests"]["ok"] else 1
