"""A decode step of a model on N GPUs beside one of them, over NCCL, with random weights, which need no download.

Each rank is a process that holds its share; rank 0 holds the whole model as well, and both take turns. The same code
runs over gloo with a tiny model, which is how it is tested where there is one GPU or none.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict
from typing import Any

import torch

from minillm.attention.backends import make_attention
from minillm.attention.protocol import Batch, Row
from minillm.bench.common import Options, progress, random_tokens, synchronize
from minillm.bench.main import _find_kernels
from minillm.bench.tensor import ROWS, collectives
from minillm.cache.pool import KVPool
from minillm.config import ModelConfig
from minillm.models.transformer import Transformer
from minillm.models.weights import expected_shapes, fuse, random_weights
from minillm.parallel.executor import MicroBatch, StageExecutor
from minillm.parallel.group import Alone, Group
from minillm.parallel.linear import parallelise
from minillm.parallel.processes import run_processes
from minillm.parallel.shard import Place, local_config, local_tensors
from minillm.roofline.comm import Link
from minillm.roofline.evidence import seconds
from minillm.roofline.predict import predict_step

BLOCK = 16
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.01}  # of the largest logit: sums in another order
CHECK_LAYERS = 2


class Cards:
    """Several GPUs: a decode step of random weights on N of them and on one, by NCCL."""

    def __init__(self, options: Options, link: Link, device: Any, config: ModelConfig, sizes: tuple[int, ...]):
        self.options, self.link, self.device, self.config, self.sizes = options, link, device, config, sizes
        self.repeats, self.context = options.repeats or 9, 512
        self.backend = "gloo" if options.on_cpu else "nccl"

    @property
    def setup(self) -> dict[str, Any]:
        return {"cards": self.sizes, "cards_rows": ROWS, "cards_context": self.context}

    def close(self) -> None:
        pass

    def expect(self, book: Any) -> None:
        for tp in self.sizes:
            for rows in ROWS:
                alone = predict_step(self.config, [(1, self.context - 1)] * rows, self.device, self.options.dtype)
                said = collectives(self.config, rows, tp, self.options.dtype)[1:]  # no scheduler runs
                book.expect(
                    f"cards.tp{tp}.x{rows}", "tp_step", step_s=alone.expected, ranks=tp, cores=tp, alone=1,
                    link=self.link.to_dict(), collectives=said,
                )  # fmt: skip

    def measure(self, book: Any) -> None:
        for tp in progress(self.sizes, "cards"):
            ranks = run_processes(
                tp, "minillm.bench.cards:work",
                {
                    "model": asdict(self.config), "dtype": self.options.dtype, "rows": list(ROWS),
                    "context": self.context, "repeats": self.repeats, "seed": self.options.seed,
                    "cuda": not self.options.on_cpu,
                },
                backend=self.backend, timeout_s=240.0,
            )  # fmt: skip
            for rows in ROWS:
                each = [rank["seconds"][str(rows)] for rank in ranks]
                book.measured(f"cards.tp{tp}.x{rows}", [max(turn) for turn in zip(*each, strict=True)])
                book.measured(f"cards.one.tp{tp}.x{rows}", ranks[0]["alone"][str(rows)])
                book.derive(
                    f"cards.speedup.tp{tp}.x{rows}", "ratio", [f"cards.one.tp{tp}.x{rows}", f"cards.tp{tp}.x{rows}"]
                )
                said = statistics.median(rank["said"][str(rows)] for rank in ranks)
                book.measured(f"cards.said.tp{tp}.x{rows}", [said], note="all-reduces of a step, each waited for")
            error, limit = max(rank["error"] for rank in ranks), ranks[0]["limit"]
            detail = f"off by {error:.1e} of the largest logit, allowed {limit:.0e}"
            book.check(f"logits of {tp} ranks are those of one", error <= limit, detail)

    @staticmethod
    def lines(record: dict[str, Any]) -> list[str]:
        lines = ["a decode step on N cards"]
        for tp in record["setup"]["cards"]:
            for rows in record["setup"]["cards_rows"]:
                key = f"tp{tp}.x{rows}"
                ratio, e = record["derived"][f"cards.speedup.{key}"], record["results"][f"cards.{key}"]
                expected = record["predictions"][f"cards.{key}"]["prediction"]["expected"]
                lines.append(
                    f"  {tp} cards, {rows} rows: {seconds(e['median'])}, predicted {seconds(expected)}; "
                    f"{ratio['median']:.2f} times as fast as one (p10 {ratio['p10']:.2f}, p90 {ratio['p90']:.2f}); "
                    f"{seconds(record['results'][f'cards.said.{key}']['median'])} in all-reduces"
                )
        return lines


class Side:
    """A model with a pool in which `rows` sequences of `context` tokens lie, to compute their last token again."""

    def __init__(self, model: Transformer, group: Group, place: Place, rows: int, context: int):
        blocks = -(-context // BLOCK)
        pool = KVPool(model.config, rows * blocks, BLOCK, model.dtype, device=model.device)
        self.executor = StageExecutor(model, make_attention("auto", model, pool), group, place)
        self.tables = [list(range(1 + r * blocks, 1 + (r + 1) * blocks)) for r in range(rows)]  # block 0 is padding
        self.device = model.device

    def compute(self, tokens: list[list[int]], start: int) -> torch.Tensor:
        """Logits after the tokens from `start` of each sequence; those before must have been computed."""
        rows = [
            Row(i, start, len(t) - start, table) for i, (t, table) in enumerate(zip(tokens, self.tables, strict=True))
        ]
        batch = Batch.build(rows, [x for t in tokens for x in t[start:]], self.device)
        logits = self.executor.step([MicroBatch(batch, list(range(len(rows))))])
        assert logits is not None  # every rank here is of the last stage
        return logits


def share(config: ModelConfig, place: Place, dtype: torch.dtype, device: str, seed: int) -> Transformer:
    """This rank's part of the weights that `random_weights` gives for this seed."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = expected_shapes(config)
    wanted, state = local_tensors(config, place, shapes), {}
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator)
        tensor = tensor.add_(1.0) if name.endswith("norm.weight") else tensor
        if name in wanted:
            local, cut = wanted[name]
            state[local] = tensor[cut].clone()
    return Transformer(local_config(config, place.tp), fuse(local_config(config, place.tp), state, place))


def work(
    group: Group, model: dict[str, Any], dtype: str, rows: list[int], context: int, repeats: int, seed: int, cuda: bool
) -> dict[str, Any]:  # fmt: skip
    """{"seconds": {rows: [a turn's]}, "alone": the same of the whole model on rank 0, "said": {rows: s}, "error"}."""
    if cuda:  # each rank is a fresh Python
        _find_kernels()
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in model.items()}
    config, device = ModelConfig(**fields), f"cuda:{group.rank}" if cuda else "cpu"
    place, kind = Place(group.rank, group.size), getattr(torch, dtype)
    found: dict[str, Any] = {
        "seconds": {}, "alone": {}, "said": {}, "limit": TOLERANCE[dtype],
        "error": _error(group, place, config.replace(num_layers=CHECK_LAYERS), kind, device, seed),
    }  # fmt: skip
    part = parallelise(share(config, place, kind, device, seed), group, place)
    whole = Transformer(config, random_weights(config, kind, device, seed)) if group.rank == 0 else None
    for count in rows:
        rng = random.Random(f"{seed} {count}")
        tokens = [random_tokens(rng, context, config.vocab_size) for _ in range(count)]
        mine = Side(part, group, place, count, context)
        alone = None if whole is None else Side(whole, Alone(), Place(), count, context)
        sides: list[tuple[str, Side | None]] = [("seconds", mine), ("alone", alone)]
        for _, side in sides:
            if side is not None:
                side.compute(tokens, 0)  # the context that a decode step finds
        samples: dict[str, list[float]] = {"seconds": [], "alone": []}
        for turn in range(repeats + 3):
            for name, side in sides[:: 1 if turn % 2 == 0 else -1]:
                group.all_reduce(torch.zeros(1, device=device))  # the others wait while rank 0 runs alone
                synchronize(device)
                if side is not None and (spent := _timed(side, tokens, context, device)) and turn >= 3:
                    samples[name].append(spent)
        for name, taken in samples.items():
            found[name][str(count)] = taken
        found["said"][str(count)] = _said(group, mine, tokens, context)
    return found


def _timed(side: Side, tokens: list[list[int]], context: int, device: str) -> float:
    begun = time.perf_counter()
    side.compute(tokens, context - 1)
    synchronize(device)
    return time.perf_counter() - begun


def _said(group: Group, side: Side, tokens: list[list[int]], context: int) -> float:
    """Seconds in the all-reduces of a step, each waited for: in a pass of its own, since waiting costs."""
    group.traffic.clear()
    group.timed = True  # type: ignore[attr-defined]
    side.compute(tokens, context - 1)
    group.timed = False  # type: ignore[attr-defined]
    return group.traffic.seconds["all_reduce"]


def _error(group: Group, place: Place, config: ModelConfig, dtype: torch.dtype, device: str, seed: int) -> float:
    """Largest difference of the logits of all ranks together from those of the whole, over the largest logit."""
    tokens = [random_tokens(random.Random(seed), BLOCK + 5, config.vocab_size) for _ in range(2)]
    part = parallelise(share(config, place, dtype, device, seed), group, place)
    whole = Transformer(config, random_weights(config, dtype, device, seed))
    got = Side(part, group, place, 2, BLOCK + 5).compute(tokens, 0).float()
    want = Side(whole, Alone(), Place(), 2, BLOCK + 5).compute(tokens, 0).float()
    return ((got - want).abs().max() / want.abs().max()).item()
