"""Seconds of a step and bytes of a rank when a model is spread over ranks: tp within a layer, pp between. Lesson 14.

A rank does the operators of `cost.step` on its own heads, intermediate values, layers and tokens of the vocabulary. To
that come the messages: two all-reduces a layer and one for the embedding, each of [t, D]; one gather of logits; [t, D]
from stage to stage, and the logits back to the first. Nothing of it overlaps, in the engine as here: a layer needs the
sum before it goes on.

A stage computes a micro-batch as soon as it is free and has the input (GPipe; Huang et al., 2019). What that leaves
idle is a term of its own, as are the messages: a plan is judged by its terms. With tp = pp = 1 all of this is
`predict.predict_step`, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.parallel.pipeline import makespan, micro_batches, timetable
from minillm.parallel.shard import check, local_config, stage_layers
from minillm.roofline.comm import Link
from minillm.roofline.cost import CALLS, Op, Row, _layer, element_size, kv_bytes_per_token, step
from minillm.roofline.device import Device
from minillm.roofline.predict import predict

NOWHERE = Link("none", 1.0)  # what a single rank sends over


@dataclass(frozen=True)
class Step:
    """Prediction of one step, in seconds: a rank's mean of each term. `expected` is their sum.

    compute     its own operators, of all micro-batches
    all_reduce, all_gather   within its stage;   all_reduces: how many a step has, on all stages together
    send        between stages, as far as the step waits for it
    idle        the bubble: it waits for other stages
    lower, upper   as in predict.py; lower takes the messages as hidden altogether
    """

    expected: float
    lower: float
    upper: float
    compute: float
    all_reduce: float
    all_gather: float
    send: float
    idle: float
    all_reduces: int
    tp: int
    pp: int
    micro_batches: int
    tokens: int

    @property
    def terms(self) -> dict[str, float]:
        return {n: getattr(self, n) for n in ("compute", "all_reduce", "all_gather", "send", "idle")}


def rank_ops(
    config: ModelConfig, rows: Sequence[Row], dtype: str = "bfloat16", *, tp: int = 1, pp: int = 1, stage: int = 0,
    **how: Any,
) -> list[Op]:  # fmt: skip
    """What one rank of a stage computes in a step of rows (new tokens, context). `how` goes to `cost.step`.

    Each rank looks up all tokens in its part of the embedding: those it does not have give zeros.
    """
    local = local_config(config, tp, pp, stage).replace(vocab_size=config.vocab_size // tp)
    ops = step(local, rows, dtype, **how)
    if stage > 0:
        ops = [op for op in ops if op.name != "embedding"]
    if stage < pp - 1:
        ops = [_without_last(op, config, dtype) for op in ops if op.name != "lm_head"]
    return ops


def _without_last(op: Op, config: ModelConfig, dtype: str) -> Op:
    """Only the last stage has the norm before the head."""
    if op.name != "rms_norm":
        return op
    one, b = config.hidden_size, element_size(dtype)
    return replace(
        op, weights=op.weights - one * b, activations_read=op.activations_read - op.rows * one * b,
        activations_written=op.activations_written - op.rows * one * b, calls=op.calls - CALLS["rms_norm"],
    )  # fmt: skip


def predict_parallel(
    config: ModelConfig, rows: Sequence[Row], device: Device, dtype: str = "bfloat16", *, tp: int = 1, pp: int = 1,
    tp_link: Link = NOWHERE, pp_link: Link = NOWHERE, count: int | None = None, captured: bool = False,
    weights_as: str | None = None,
) -> Step:  # fmt: skip
    """One step over tp * pp devices of a kind. tp_link joins the ranks of a stage, pp_link the stages.

    count: most micro-batches; None is one a stage, as in the engine. captured: each rank's part of a micro-batch is one
    CUDA graph. weights_as: as in `cost.step`. Raises MinillmError with the sizes that fit when the model cannot be cut
    like this.
    """
    check(config, tp, pp)
    for n, at, what in ((tp, tp_link, "tp_link"), (pp, pp_link, "pp_link")):
        if n > 1 and at is NOWHERE:
            raise MinillmError(f"{n} ranks are joined by something: give {what}, for example comm.link('nvlink4')")
    rows = [(int(n), int(c)) for n, c in rows]
    batches = micro_batches(rows, pp if count is None else count, lambda row: row[0])
    if not batches:
        raise MinillmError("a step has at least one row: give rows as (new tokens, context)")
    size, hidden = element_size(dtype), config.hidden_size

    def parts(stage: int, batch: Sequence[Row]) -> tuple[dict[str, float], int]:
        """Seconds of one micro-batch on one rank of a stage, and the sums it takes part in."""
        ops = rank_ops(config, batch, dtype, tp=tp, pp=pp, stage=stage, weights_as=weights_as)
        if captured:
            ops = [replace(op, calls=int(i == 0)) for i, op in enumerate(ops)]
        p, new = predict(ops, device, dtype), sum(n for n, _ in batch)
        sums = 2 * len(stage_layers(config.num_layers, pp, stage)) + (stage == 0) if tp > 1 else 0
        logits = len(batch) * config.vocab_size // tp * size if stage == pp - 1 and tp > 1 else 0
        return {
            "lower": p.lower, "compute": p.expected, "upper": p.upper,
            "all_reduce": sums * tp_link.all_reduce(new * hidden * size, tp) if sums else 0.0,
            "all_gather": tp_link.all_gather(logits, tp) if logits else 0.0,
        }, sums  # fmt: skip

    made: dict[Any, tuple[dict[str, float], int]] = {}  # stages and micro-batches that are alike are worked out once
    grid = []  # [S][M]
    for stage in range(pp):
        kind = (len(stage_layers(config.num_layers, pp, stage)), stage == 0, stage == pp - 1)
        line = []
        for batch in batches:
            key = (kind, tuple(batch))
            if key not in made:
                made[key] = parts(stage, batch)
            line.append(made[key])
        grid.append(line)

    def table(*names: str) -> list[list[float]]:
        return [[sum(part[n] for n in names) for part, _ in line] for line in grid]

    said = ("all_reduce", "all_gather")

    def ends(seconds: list[list[float]], link_s: float | list[float] = 0.0) -> float:
        return makespan(timetable(seconds, link_s=link_s))

    busy = table("compute", *said)
    sends = [pp_link.send(sum(n for n, _ in b) * hidden * size) if pp > 1 else 0.0 for b in batches]
    # The first stage draws the tokens: it waits for the logits, which come in one message after the last micro-batch.
    back = pp_link.send(len(rows) * config.vocab_size * size) if pp > 1 else 0.0
    expected = ends(busy, sends) + back
    waited = expected - ends(busy)
    mean = {n: sum(map(sum, table(n))) / pp for n in ("compute", *said)}
    return Step(
        expected=expected, lower=ends(table("lower")), upper=ends(table("upper", *said), sends) + back,
        **mean, send=waited, idle=max(0.0, expected - waited - sum(mean.values())) if pp > 1 else 0.0,
        all_reduces=sum(sums for line in grid for _, sums in line), tp=tp, pp=pp, micro_batches=len(batches),
        tokens=sum(n for n, _ in rows),
    )  # fmt: skip


# Memory --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMemory:
    """The rank that has least room. Bytes but for kv_tokens: tokens whose KV fits, on all ranks.

    budget  what may be used of a device;  weights  of the rank with most;  kv_token  of a token, on the rank with most
    """

    budget: int
    weights: int
    kv_token: int
    kv_tokens: int

    @property
    def fits(self) -> bool:
        return self.weights <= self.budget


MEMORY_SHARE = 0.9  # of a device: the rest is for activations, graphs, NCCL. vLLM's default gpu_memory_utilization


def rank_parameters(config: ModelConfig, *, tp: int = 1, pp: int = 1, stage: int = 0) -> int:
    """Parameters of the first rank of a stage, the one with most: it has the biases of o and down.

    A tied table is held once by a single stage, and by the first and the last of several.
    """
    local = local_config(config, tp, pp, stage)
    table, first, last = config.vocab_size // tp * config.hidden_size, stage == 0, stage == pp - 1
    head = last and not (config.tie_word_embeddings and first)
    layers = local.num_layers * sum(_layer(local).values())
    return layers + table * (first + head) + config.hidden_size * last


def rank_memory(
    config: ModelConfig, device: Device, dtype: str = "bfloat16", *, tp: int = 1, pp: int = 1,
    share: float = MEMORY_SHARE,
) -> RankMemory:  # fmt: skip
    """What the ranks hold, and how many tokens' KV: the pool of a model is that of the rank with least room."""
    check(config, tp, pp)
    if not 0 < share <= 1:
        raise MinillmError(f"a share of a device's memory is above 0 and at most 1, got {share!r:.80}")
    budget, size = int(share * device.memory_bytes), element_size(dtype)
    weights = [rank_parameters(config, tp=tp, pp=pp, stage=s) * size for s in range(pp)]
    token = [kv_bytes_per_token(local_config(config, tp, pp, s), dtype) for s in range(pp)]
    room = min(max(0, budget - w) // t for w, t in zip(weights, token, strict=True))
    return RankMemory(budget, max(weights), max(token), room)
