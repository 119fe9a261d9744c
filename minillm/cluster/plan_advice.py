"""A plan in words: why the best is the best, and what would do where nothing does. Lesson 14 builds this."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from minillm.cluster.planner import Change, Option, Question, rank
from minillm.cluster.pools import CLEAR
from minillm.roofline.comm import LINKS, OF_DEVICE
from minillm.roofline.device import DATASHEET
from minillm.roofline.evidence import seconds

WORDS = {
    "weights": "weights and calls of a step", "decodes": "what each decode adds", "prompts": "prompts",
    "messages": "messages", "idle": "stages that wait for each other", "queue": "the queue",
}  # fmt: skip


def said(o: Option) -> float:
    """Share of a step that goes to messages."""
    s = o.step
    return (s.all_reduce + s.all_gather + s.send) / s.expected if s else 0.0


def gain_words(q: Question, o: Option) -> str:
    """What options are compared by: requests/s within the SLO where requests come, tokens/s where users wait."""
    return f"{number(o.most)} requests/s at most" if q.demand.rate is not None else f"{number(o.tokens_per_s)} tokens/s"


def number(x: float) -> str:
    """Four digits, and thousands apart."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"


def explained(q: Question, options: list[Option]) -> list[Option]:
    """The options with why each one but the best is behind it, as far as the model can tell."""
    best, rest = options[0], options[1:]
    found = [best]
    for o in rest:
        if o.at is None:
            found.append(o)
            continue
        reasons = [o.why] if o.why else [f"{gain_words(q, o)}, the best {gain_words(q, best).split()[0]}"]
        if o.close:
            reasons.append("too close to call: measure both")
        elif (cause := _cause(q, o, best)) is not None:
            reasons.append(cause)
        found.append(replace(o, why="; ".join(reasons)))
    return found


def _cause(q: Question, o: Option, best: Option) -> str | None:
    """The term that o has more of than the best, by most: of the bound that it misses worst, or of a token's cost."""
    worst = max(o.misses, key=lambda n: o.misses[n][0] / o.misses[n][1], default=None)
    kind, text = ("spent", "of all devices for each token")
    if worst == "ttft_s":
        kind, text = "first", "until the first token"
    elif worst is not None and worst != "rate":
        kind, text = "token", "a token"
    mine, other = getattr(o, kind), getattr(best, kind)
    if not mine or not other:
        return None
    more = {n: v - other.get(n, 0.0) for n, v in mine.items()}
    term = max(more, key=lambda n: more[n])
    if more[term] <= 0:
        return None
    whole, there = seconds(sum(mine.values())), seconds(other[term]) if other.get(term, 0.0) > 0 else "none"
    return f"{WORDS[term]}: {seconds(mine[term])} of {whole} {text}, {there} in the best"


def why(q: Question, options: list[Option]) -> str:
    """Two or three sentences: the best with its terms, and what it does that the others do not."""
    best = options[0]
    if best.at is None or best.step is None:
        return "Nothing fits. Nearest: " + f"{best.name}, {best.why}."
    step, lines = best.step, []
    close = [o.name for o in options if o.close]
    if best.verdict == "slow":
        lines.append(f"Nothing keeps the SLO. Nearest: {best.name}, {best.why}.")
    else:
        lines.append(
            f"{best.name}: {gain_words(q, best)}, TTFT {seconds(best.at.ttft_s)}, TPOT {seconds(best.at.tpot_s)}."
        )
        if close:
            lines.append(
                f"Too close to call: {', '.join(close)} within {CLEAR:.0%}, and no prediction here is truer than that. "
                "Measure them."
            )
    lines.append(
        f"A step of {max(1, round(best.at.decoding))} takes {seconds(step.expected)}: "
        + ", ".join(f"{n.replace('_', '-')} {seconds(v)}" for n, v in step.terms.items() if v > 0) + "."
    )  # fmt: skip
    other = next((o for o in options[1:] if o.step and o.tp != best.tp and o.pp == best.pp), None)
    alone = next((o for o in options if o.tp == o.pp == 1), None)
    if best.tp == best.pp == 1:
        text = "The model fits one device, so no rank waits for another."
        if other:
            text += f" {other.name} would spend {said(other):.0%} of its step on messages."
        lines.append(text)
    elif best.tp > 1:
        often = "a step" if step.micro_batches == 1 else f"for each of {step.micro_batches} micro-batches"
        text = f"A device reads 1/{best.tp * best.pp} of the weights {often}; messages are {said(best):.0%} of a step."
        if alone and alone.step:
            text += (
                f" A single device takes {seconds(alone.step.expected)} a step of {max(1, round(alone.at.decoding))}."
                if alone.at
                else ""
            )
        elif alone:
            text += f" One device is not enough: {alone.why}."
        lines.append(text)
    else:
        text = f"{best.pp} stages hold the model and say little: messages are {said(best):.0%} of a step."
        if other:
            text += f" {other.name} would spend {said(other):.0%} of its step on them."
        lines.append(text)
    return " ".join(lines)


# What would do -------------------------------------------------------------------------------------------------------


Candidate = tuple[str, Question]


def nearest(q: Question, options: list[Option]) -> list[Change]:
    """Changes of one thing that make a plan good, each planned: load, bounds, lengths, devices, links.

    Of each kind the first, which is the smallest.
    """
    if options[0].verdict == "good":
        return []
    changes = []
    for candidates in (_load, _bounds, _lengths, _more_devices, _other_devices, _other_link):
        for text, question in candidates(q, options):
            best = rank(question, quick=True)[0]
            if best.verdict == "good":
                changes.append(Change(f"{text} ({best.name})", question))
                break
    return changes


def _load(q: Question, options: list[Option]) -> Iterator[Candidate]:
    """The highest load that some option takes."""
    if q.demand.rate is not None:
        rate = float(f"{0.995 * max(o.most for o in options):.3g}")
        if rate > 0:
            yield f"at most {rate:g} requests/s", replace(q, demand=replace(q.demand, rate=rate))
    elif users := max(o.most_users for o in options):
        many = f"{users} users" if users > 1 else "1 user"
        yield f"at most {many} at a time", replace(q, demand=replace(q.demand, concurrency=users))


def _bounds(q: Question, options: list[Option]) -> Iterator[Candidate]:
    """What the nearest option can promise."""
    best = options[0]
    if best.at is None or "rate" in best.misses:
        return
    eased: dict[str, Any] = {n: _up(v) for n, (v, _) in best.misses.items()}
    text = ", ".join(f"{n.removesuffix('_s').upper()} {seconds(v)}" for n, v in eased.items())
    yield f"bounds of {text}", replace(q, slo=replace(q.slo, **eased))


def _up(value: float) -> float:
    """Three digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit * (1 + 1e-12)) * unit


def _lengths(q: Question, options: list[Option]) -> Iterator[Candidate]:
    """Where weights fit and one request's KV does not: the longest prompt that does."""
    room = max((o.memory.kv_tokens for o in options if o.memory and o.memory.fits and o.at is None), default=0)
    prompt = room - q.demand.output_tokens
    if options[0].at is None and prompt >= 1:
        yield f"prompts of at most {prompt} tokens", replace(q, demand=replace(q.demand, prompt_tokens=prompt))


def _more_devices(q: Question, options: list[Option]) -> Iterator[Candidate]:
    count = 2 * q.fleet.count
    while count <= 64 and (q.fleet.node is None or count <= q.fleet.node or q.fleet.between is not None):
        yield f"{count} devices of this kind", replace(q, fleet=replace(q.fleet, count=count))
        count *= 2


def _other_devices(q: Question, options: list[Option]) -> Iterator[Candidate]:
    """The same number of others, each with its own link within the node; those with least memory bandwidth first."""
    for key in sorted(OF_DEVICE, key=lambda k: DATASHEET[k].read_bandwidth):
        if DATASHEET[key].name != q.fleet.device.name:
            fleet = replace(q.fleet, device=DATASHEET[key], within=LINKS[OF_DEVICE[key]])
            yield f"{q.fleet.count} x {DATASHEET[key].name}", replace(q, fleet=fleet)


def _other_link(q: Question, options: list[Option]) -> Iterator[Candidate]:
    """The slowest link within the node that is quick enough."""
    if q.fleet.count > 1 and options[0].at is not None:
        for faster in sorted(LINKS.values(), key=lambda x: x.bandwidth):
            if faster.bandwidth > q.fleet.within.bandwidth:
                yield f"{faster.name} between the devices", replace(q, fleet=replace(q.fleet, within=faster))
