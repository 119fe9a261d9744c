"""The ladder's first two rungs, step by step: recompute everything, or keep keys and values. Lessons 01 and 02.

Time of one step against context for both, of prefill against length, and of decode against batch. Predictions are
sealed first; a fit on half of the steps is judged on the other half. Runs on a bare GPU machine with a random-weight
model of real shapes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from minillm.bench.common import (
    Options,
    ceilings,
    ceilings_after,
    clock,
    load_model,
    progress,
    random_tokens,
    recorder,
)
from minillm.models.transformer import Transformer
from minillm.request import Request, SamplingParams
from minillm.roofline.evidence import table_of
from minillm.roofline.record import Recorder
from minillm.runner import CachedRunner, NaiveRunner

CONTEXTS = {"cpu": (16, 64, 128, 256, 512, 1024), "cuda": (128, 512, 1024, 2048, 4096)}
BATCHES = {"cpu": (4, 16, 32), "cuda": (8, 32, 64)}
LONGEST_BATCHED = {"cpu": 512, "cuda": 1024}
MODEL = {"cpu": "smollm2-135m", "cuda": "llama-3.1-8b"}
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}  # of the largest logit; a wrong cache is off by 1


def plan(options: Options) -> dict[str, dict[str, Any]]:
    """key -> what is run: `rows` and `kv_cache`, as cost.step reads them."""
    kind = "cpu" if options.on_cpu else "cuda"
    contexts = options.contexts or CONTEXTS[kind]
    steps: dict[str, dict[str, Any]] = {}
    for n in contexts:
        steps[f"naive_{n}"] = {"rows": [(n, 0)], "kv_cache": False}
        steps[f"prefill_{n}"] = {"rows": [(n, 0)], "kv_cache": True}
        steps[f"decode_{n}"] = {"rows": [(1, n - 1)], "kv_cache": True}  # the token that naive_n recomputes all for
    short = [n for n in contexts if n <= LONGEST_BATCHED[kind]] or list(contexts[:1])
    for batch in BATCHES[kind]:
        for n in dict.fromkeys((short[-3:][0], short[-1])):
            steps[f"decode_{n}x{batch}"] = {"rows": [(1, n - 1)] * batch, "kv_cache": True}
    return steps


def run(options: Options) -> dict[str, Any]:
    """Predict, seal, measure, check. Returns the record."""
    options.model = options.model or MODEL["cpu" if options.on_cpu else "cuda"]
    repeats = options.repeats or 9
    device = ceilings(options)
    steps = plan(options)
    model, source = load_model(options, max_len=max(n + c for s in steps.values() for n, c in s["rows"]) + 1)
    book = recorder(options, device, weights=source, repeats=repeats)
    for key, work in steps.items():
        book.predict(key, model.config, options.dtype, **work)
    options.out(f"predictions sealed: sha256 {book.seal()}")
    for key, work in progress(list(steps.items()), "ladder"):
        step = prepare(model, work["rows"], work["kv_cache"], options.seed)
        for _ in range(2):
            step()
        book.measured(key, [clock(step, options.device) for _ in range(repeats)])
        book.derive(f"{key}.share", "share", [key])
        book.derive(f"{key}.residual", "residual", [key])
        del step
    for n in [k.removeprefix("naive_") for k in steps if k.startswith("naive_")]:
        book.derive(f"speedup_{n}", "ratio", [f"naive_{n}", f"decode_{n}"])
    keys = list(steps)
    if len(keys) >= 8:
        book.derive("fit_error", "fit_error", keys[1::2], train=keys[::2])
    check(book, model, steps, options)
    return book.finish(ceilings_after(options))


def prepare(model: Transformer, rows: list[tuple[int, int]], kv_cache: bool, seed: int) -> Callable[[], torch.Tensor]:
    """A function that runs the step and returns the logits; called again, it runs the same step again."""
    rng = random.Random(seed)
    requests = [request(random_tokens(rng, n + c, model.config.vocab_size)) for n, c in rows]
    if not kv_cache:
        naive = NaiveRunner(model)
        return lambda: naive.forward(requests)
    cached = CachedRunner(model)
    cached.start(requests)
    for r, (_, context) in zip(requests, rows, strict=True):
        if context:  # compute the whole once, so that the context's keys and values are real ones
            cached.forward([r])

    def step() -> torch.Tensor:
        for r, (_, context) in zip(requests, rows, strict=True):
            r.num_computed_tokens = context  # the counter goes back, and the same tokens are computed again
        return cached.forward(requests)

    return step


def request(tokens: list[int]) -> Request:
    return Request("bench", tokens, SamplingParams(temperature=0.0, max_tokens=1), seed=0, max_tokens=1)


def check(book: Recorder, model: Transformer, steps: dict[str, dict[str, Any]], options: Options) -> None:
    """Both rungs must give the same logits for the same tokens."""
    lengths = [key.removeprefix("naive_") for key in steps if key.startswith("naive_")]
    for n in dict.fromkeys((lengths[0], lengths[-1])):
        naive, cached = (
            prepare(model, steps[key]["rows"], steps[key]["kv_cache"], options.seed)().float()
            for key in (f"naive_{n}", f"decode_{n}")
        )
        error = ((naive - cached).abs().max() / naive.abs().max()).item()
        limit = TOLERANCE[options.dtype]
        detail = f"largest difference {error:.2e} of the largest logit, allowed {limit:.0e}"
        book.check(f"cached logits equal recomputed ones after {n} tokens", error <= limit, detail)


def show(record: dict[str, Any]) -> str:
    """The record as text."""
    predicted = list(record["predictions"])
    lines = [table_of(record, predicted), ""]
    for key, entry in record["derived"].items():
        if key.startswith("speedup_"):
            lines.append(
                f"{key.removeprefix('speedup_'):>6} tokens: the cache makes a step {entry['median']:.1f} times faster"
            )
    if "fit_error" in record["derived"]:
        fit = record["derived"]["fit_error"]
        factors = ", ".join(f"{name} {value:.2f}" for name, value in fit["factors"].items())
        lines.append(
            f"fitted on every other step ({factors} times the roofline), the rest is missed by {fit['median']:.0%}"
        )
    return "\n".join(lines)
