"""What launching costs a decode step: the same step eager and as a replayed CUDA graph. Lesson 07 reads the record.

Three models, batches from one upwards, the paged engine with the Triton kernels. Both sides take turns in one run, and
their logits are compared. The prediction is the roofline's, with the launch latency measured on the card: the eager
step should come near the expected time of many calls, the replay near the lower bound.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from minillm.attention.triton import TritonAttention, TritonOps
from minillm.bench.common import Options, ceilings, ceilings_after, clock, progress, random_tokens, recorder
from minillm.cache.paged import PagedCache
from minillm.cache.pool import KVPool
from minillm.errors import MinillmError
from minillm.graphs import DecodeGraphs
from minillm.models.presets import preset
from minillm.models.transformer import Transformer
from minillm.models.weights import random_weights
from minillm.request import Request, SamplingParams
from minillm.roofline.evidence import table_of
from minillm.runner import PagedRunner

MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.1-8b")
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 512
BLOCK = 16
TOLERANCE = 0.02  # of the largest logit: split counts differ between the two, so sums are taken in another order


def run(options: Options) -> dict[str, Any]:
    """Predict, seal, measure, check. Only on a CUDA device: on a CPU there is nothing to capture."""
    if options.on_cpu:
        raise MinillmError("launch compares CUDA graphs with eager steps, so it needs a CUDA device; see lesson 07")
    repeats = options.repeats or 15
    device = ceilings(options)
    options.model = ", ".join(MODELS)
    book = recorder(options, device, weights="random", repeats=repeats, mode="eager and CUDA graph", context=CONTEXT)
    for name in MODELS:
        for batch in BATCHES:
            for side, how in (("eager", {}), ("graph", {"captured": True})):
                rows = [(1, CONTEXT - 1)] * batch
                book.predict(f"{side}.{name}.x{batch}", preset(name), options.dtype, rows=rows, **how)
    options.out(f"predictions sealed: sha256 {book.seal()}")
    for name in progress(MODELS, "launch"):
        config = preset(name)
        weights = random_weights(config, options.torch_dtype, options.device, options.seed)
        model = Transformer(config, weights, CONTEXT + BLOCK)
        model.ops = TritonOps()
        for batch in BATCHES:
            eager, graph = steps(model, batch, options)
            want, got = eager().float(), graph().float()
            error = ((want - got).abs().max() / want.abs().max()).item()
            detail = f"largest difference {error:.1e} of the largest logit, allowed {TOLERANCE}"
            book.check(f"{name} x{batch}: replayed logits equal eager ones", error <= TOLERANCE, detail)
            samples: dict[str, list[float]] = {"eager": [], "graph": []}
            for _ in range(repeats):
                samples["eager"].append(clock(eager, options.device))
                samples["graph"].append(clock(graph, options.device))
            for side, taken in samples.items():
                book.measured(f"{side}.{name}.x{batch}", taken)
            book.derive(f"ratio.{name}.x{batch}", "ratio", [f"eager.{name}.x{batch}", f"graph.{name}.x{batch}"])
        del model, weights, eager, graph
        torch.cuda.empty_cache()
    return book.finish(ceilings_after(options))


def steps(
    model: Transformer, batch: int, options: Options
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """(eager, graph): each runs the same decode step of `batch` sequences again, and returns the logits."""
    pool = KVPool(
        model.config, batch * (CONTEXT // BLOCK + 1), BLOCK, options.torch_dtype, device=torch.device(options.device)
    )
    cache, attention = PagedCache(pool), TritonAttention(pool)
    always = lambda eager, replay: True
    eager = PagedRunner(model, cache, attention)
    graph = PagedRunner(model, cache, attention, DecodeGraphs(model, attention, batch, pays=always))
    draw = random.Random(options.seed)
    requests = [
        Request(str(i), random_tokens(draw, CONTEXT, model.config.vocab_size), SamplingParams(), 0, max_tokens=1)
        for i in range(batch)
    ]
    eager.start(requests)
    for r in requests:
        eager.forward([r])

    def step(runner: PagedRunner) -> torch.Tensor:
        for r in requests:
            r.num_computed_tokens = CONTEXT - 1
        return runner.forward(requests)

    return (lambda: step(eager)), (lambda: step(graph))


def show(record: dict[str, Any]) -> str:
    lines = [table_of(record, list(record["predictions"])), ""]
    for key, entry in record["derived"].items():
        lines.append(
            f"{key.removeprefix('ratio.'):>24}: a replay is {entry['median']:.2f} times as fast as an eager step"
        )
    return "\n".join(lines)
