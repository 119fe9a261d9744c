"""Predictions about several devices that no operator gives: collectives, bubbles, a step on few cores. Lesson 14.

Each is a function of plain data, see quantities.py.
"""

from __future__ import annotations

import math
from typing import Any

from minillm.roofline.comm import Link

# How far a measurement may be off, choices made before measuring: an all-reduce of a size the fit has not seen, as a
# share; the bubble of a run in real time, and the part of a transfer that the prefill does not hide, absolutely.
PARALLEL_GOALS = {"all_reduce": 0.15, "bubble": 0.05, "exposed": 0.25}
EXACT = 1e-12  # rounding of a sum of float64


def all_reduce(shape: dict[str, Any]) -> dict[str, float]:
    """Seconds of one all-reduce: {"link": fields of comm.Link, "nbytes", "ranks"}. No theory gives a floor on a CPU."""
    expected = Link(**shape["link"]).all_reduce(shape["nbytes"], shape["ranks"])
    return {"lower": 0.0, "expected": expected, "upper": (1 + PARALLEL_GOALS["all_reduce"]) * expected}


def bubble(shape: dict[str, Any]) -> dict[str, float]:
    """Idle share of a pipeline, (S - 1) / (M + S - 1): exact on a virtual clock, hoped for on a real one."""
    stages, count = shape["stages"], shape["micro_batches"]
    expected = (stages - 1) / (count + stages - 1)
    if shape["clock"] == "virtual":
        return {"lower": expected - EXACT, "expected": expected, "upper": expected + EXACT}
    return {"lower": 0.0, "expected": expected, "upper": expected + PARALLEL_GOALS["bubble"]}


def tp_step(shape: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step on `ranks` devices or, on a CPU, processes of one thread that share `cores` cores.

    One process takes `step_s` with `alone` of the cores (all of a CPU's; one GPU). N equal parts on C cores run in
    ceil(N / C) waves, so the arithmetic takes alone * ceil(N / C) / N as long. Then each of `collectives`, [kind,
    count, bytes of a rank's tensor], takes what `link` says: more ranks than cores need one that was measured with as
    many, for their messages wait for a core (`comm.in_turns`). upper: the parts run one after the other on one core.
    """
    link, ranks, cores, alone = Link(**shape["link"]), shape["ranks"], shape["cores"], shape["alone"]
    cost = {
        "all_reduce": lambda n: link.all_reduce(n, ranks), "all_gather": lambda n: link.all_gather(n, ranks),
        "broadcast": lambda n: (ranks - 1) * link.send(n),
    }  # fmt: skip
    said = sum(count * cost[kind](nbytes) for kind, count, nbytes in shape["collectives"])
    expected = shape["step_s"] * alone * math.ceil(ranks / cores) / ranks + said
    return {"lower": 0.0, "expected": expected, "upper": shape["step_s"] * alone + said}


def moved(shape: dict[str, Any]) -> dict[str, float]:
    """Seconds to hand `nbytes` bytes from one process to another in `pieces` pieces.

    `sender` and `receiver`: bytes/s of what each does with every piece, one after the other. The two overlap as a
    pipeline of two stages does: the slower one takes its whole time, the other shows in one piece. upper: no overlap.
    """
    each = [sum(shape["nbytes"] / rate for rate in shape[side]) for side in ("sender", "receiver")]
    return {"lower": 0.0, "expected": max(each) + min(each) / shape["pieces"], "upper": sum(each)}


def split_ttft(shape: dict[str, Any]) -> dict[str, float]:
    """Seconds to a first token from a split: the prefill, what of the transfer it does not hide, and a decode step.

    Layer by layer, all of the transfer but the last layer's overlaps the prefill, as far as it is the faster one.
    """
    prefill, transfer, layers = shape["prefill_s"], shape["transfer_s"], shape["layers"]
    tail = transfer / layers + max(0.0, transfer - prefill) * (layers - 1) / layers
    return {
        "lower": 0.0,
        "expected": prefill + tail + shape["step_s"],
        "upper": prefill + transfer + 2 * shape["step_s"],
    }


KNOWN = {"all_reduce": all_reduce, "bubble": bubble, "tp_step": tp_step, "moved": moved, "split_ttft": split_ttft}
