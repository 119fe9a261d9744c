"""Why a prefill/decode split does not pay: the model is asked what would have to change. Lesson 15 builds it.

One condition is eased at a time: more load, a better link, longer prompts, a larger pool. If the split then pays, that
condition is a reason, with the least value tried that would do. If none does, good chunks are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from minillm.cluster.migration import Migration, Wire
from minillm.cluster.pools import MARGIN, Pool, gain_of, pays
from minillm.cluster.step_times import Steps, Workload
from minillm.roofline.evidence import seconds
from minillm.trace.latency import SLO

LOADS, PROMPTS, LINKS, POOLS = "low load", "short context", "weak network", "small pool"
CHUNKS, ROOM, REACH = "chunking is enough", "no room", "out of reach"
LONGER, LONGEST = (2, 4, 8, 16), 32_768  # times as long, up to so many tokens
FASTER = (2, 4, 8, 16, 64, 1024)  # times as fast
LARGER = (3, 4, 6, 8, 12)  # engines, up to four times as many


@dataclass(frozen=True)
class Reason:
    """Why it does not pay. code: LOADS, PROMPTS, LINKS, POOLS, CHUNKS, ROOM or REACH.

    would_pay_at  the value of the condition from which it would (requests/s, tokens, bytes/s, engines); None: unknown,
                  or it is the link's latency that has to change
    latency_s     of the link, where that has to change, alone or with its bandwidth
    """

    code: str
    words: str
    would_pay_at: float | None = None
    latency_s: float | None = None


def why_not(
    steps: Steps, slo: SLO, wire: Wire, here: Pool, splits: Sequence[Pool], moved: Migration | None
) -> list[Reason]:
    """here: co-located; splits: best first; moved: the handoff of a prompt. Not empty."""
    n, rate, block = here.engines, steps.workload.rate, steps.engine.block_size
    if n == 1 or not splits or moved is None:
        return [Reason(POOLS, "a split needs at least two engines, one of each kind")]
    if not here.goodput and not splits[0].goodput:
        return [_out_of_reach(slo, here)]
    if not moved.tokens:
        return [Reason(PROMPTS, (
            f"a prompt of {steps.workload.prompt_tokens} tokens lies within a block of {block}, and of a prompt whole "
            "blocks move: prefill engines would have nothing to do"
        ))]  # fmt: skip
    reasons = []
    if rate is not None and rate <= here.goodput:
        words = f"{n} co-located engines hold both bounds up to {here.goodput:.3g} requests/s, and only {rate:.3g} come"
        if gain_of(here, splits, None) >= 1 + MARGIN:
            return [Reason(LOADS, words, (1 + MARGIN) * here.goodput)]
        reasons.append(Reason(LOADS, f"{words}; at more load it would not pay either"))
    if reason := _faster_link(steps, slo, wire, here, moved):
        return [*reasons, reason]  # what else would help has to cross the same link
    reasons += [r for r in (_longer_prompts(steps, slo, wire, n), _larger_pool(steps, slo, wire, n, splits[0])) if r]
    if not reasons and here.bottleneck in ("kv", "seats"):
        held = "memory for KV is" if here.bottleneck == "kv" else f"{steps.seats} seats of an engine (max_num_seqs) are"
        return [Reason(ROOM, f"the {held} taken before the time of the engines is, and a split has no more of them")]
    return reasons or [Reason(CHUNKS, (
        f"chunks of {here.budget} tokens already bound what a prompt does to other people's tokens; neither longer "
        "prompts, nor a faster link, nor more engines alone would make it pay"
    ))]  # fmt: skip


def _longer_prompts(steps: Steps, slo: SLO, wire: Wire, n: int) -> Reason | None:
    w, engine = steps.workload, steps.engine
    most = min(LONGEST, engine.config.max_position_embeddings, engine.capacity)
    for m in (times * w.prompt_tokens for times in LONGER if times * w.prompt_tokens + w.output_tokens <= most):
        longer = Steps(steps.engine, Workload(m, w.output_tokens))
        if pays(longer, n, slo, wire):
            return Reason(PROMPTS, (
                f"a prompt of {w.prompt_tokens} tokens holds up other people's tokens too little; it would pay "
                f"from about {m}"
            ), float(m))  # fmt: skip
    return None


def _faster_link(steps: Steps, slo: SLO, wire: Wire, here: Pool, m: Migration) -> Reason | None:
    """Bandwidth is eased alone, then latency, then both."""
    for wider, nearer in ((True, False), (False, True), (True, True)):
        for times in FASTER:
            better = replace(
                wire,
                bandwidth=wire.bandwidth * (times if wider else 1),
                latency_s=wire.latency_s / (times if nearer else 1),
            )
            if better == wire or not pays(steps, here.engines, slo, better, here):
                continue
            need = [f"about {better.bandwidth / 1e9:.3g} GB/s"] if wider else []
            need += [f"a latency of about {seconds(better.latency_s)}"] if nearer else []
            return Reason(LINKS, (
                f"{megabytes(m.bytes)} of KV a prompt take {m.transfer_s:.3g} s at {wire.bandwidth / 1e9:.3g} GB/s"
                f"{f' and a latency of {seconds(wire.latency_s)}' if nearer else ''}; it would pay from "
                f"{' with '.join(need)}"
            ), better.bandwidth if wider else None, better.latency_s if nearer else None)  # fmt: skip
    return None


def _larger_pool(steps: Steps, slo: SLO, wire: Wire, n: int, best: Pool) -> Reason | None:
    for more in (k for k in LARGER if n < k <= 4 * n):
        if pays(steps, more, slo, wire):
            return Reason(POOLS, (
                f"{n} engines cannot be cut in the proportion that this load needs (the best is {best.name}, full by "
                f"{best.bottleneck}); it would pay from {more}"
            ), float(more))  # fmt: skip
    return None


def _out_of_reach(slo: SLO, here: Pool) -> Reason:
    alone = here.forecast
    return Reason(REACH, (
        f"even alone a request has a TTFT of {seconds(alone.ttft_s)} and a TPOT of {seconds(alone.tpot_s)}, and the "
        f"bounds are {seconds(slo.ttft_s or 0.0)} and {seconds(slo.tpot_s or 0.0)}: take a faster device, tensor "
        "parallelism, or wider bounds"
    ))  # fmt: skip


def megabytes(size: float) -> str:
    """Three digits, or whole megabytes with thousands apart."""
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e6:,.0f} MB"
