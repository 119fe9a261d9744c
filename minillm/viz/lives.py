"""What happened to each request, read from an event log. Lessons 09 to 12 draw it; nothing is drawn here.

`lives` gives each request's spans, for `timeline`; `state_at` gives one step as the scheduler saw it, for the explorer.
Steps are numbered from the first one in the log, so that a log that was cleared before a run starts at 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from minillm.errors import MinillmError
from minillm.events import Event

Axis = Literal["step", "time"]
STOPS = ("finished", "refused")


@dataclass
class Span:
    """kind: waiting, chunk (tokens of a prompt, or of one that is recomputed), decode (one token a step, steps in a row
    together), held (it runs, and this step gives it nothing), preempted."""

    kind: str
    start: float
    end: float
    tokens: int = 0


@dataclass
class Mark:
    """kind: hit, preempted, finished, aborted, refused. text: tokens found, how it lost its blocks, the reason."""

    kind: str
    x: float
    text: str


@dataclass
class Life:
    """One request: what it did when. x is a step number, or seconds since the log's first event."""

    request_id: str
    prompt_tokens: int | None = None
    priority: int = 0
    tenant: str = ""
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def seconds(self, *kinds: str) -> float:
        """How long it was in spans of these kinds; in steps, if the x axis is."""
        return sum(s.end - s.start for s in self.spans if s.kind in kinds)


@dataclass(frozen=True)
class Step:
    """One step: where it lies on the x axis, its tokens, and the state behind it. Blocks are None without pages."""

    start: float
    end: float
    prefill: int
    decode: int
    requests: int
    waiting: int
    running: int
    live: int | None = None
    cached: int | None = None
    free: int | None = None


class Clock:
    """Where events lie on the x axis."""

    def __init__(self, events: list[Event], by: Axis):
        if by not in ("step", "time"):
            raise MinillmError(f"a timeline runs by 'step' or by 'time', got {by!r}")
        self.by = by
        self.steps = {e.step: e for e in events if e.kind == "step"}
        if not self.steps:
            raise MinillmError("no step in this event log: run some requests first, then draw them")
        self.first = min(self.steps)
        self.origin = min(e.time - e.data.get("seconds", 0.0) for e in events)

    def at(self, event: Event) -> float:
        return event.step - self.first if self.by == "step" else event.time - self.origin

    def bounds(self, step: Event) -> tuple[float, float]:
        at = self.at(step)
        return (at, at + 1) if self.by == "step" else (at - step.data.get("seconds", 0.0), at)


def is_decode(new: int, computed: int, prompt: int | None) -> bool:
    """Whether a row is a decode step: one token behind a prompt that is computed."""
    return new == 1 and (prompt is None or computed >= prompt)


def lives(events: Iterable[Event], by: Axis = "step") -> list[Life]:
    """The requests of a log in the order of their arrival. Raises MinillmError for a log without a step."""
    log = list(events)
    clock = Clock(log, by)
    out: dict[str, Life] = {}
    since: dict[str, float] = {}
    state: dict[str, str] = {}
    ending: dict[str, Event] = {}  # who finished in this step: its row comes with the step's own event, just behind

    def life(name: str, at: float) -> Life:
        if name not in out:  # its beginning may have left a bounded log
            out[name], since[name], state[name] = Life(name), at, "waiting"
        return out[name]

    def close(name: str, at: float) -> None:
        kind = {"running": "held"}.get(state[name], state[name])
        if at > since[name]:
            out[name].spans.append(Span(kind, since[name], at))
        since[name] = at

    for e in log:
        at = clock.at(e)
        if e.kind == "step":
            start, end = clock.bounds(e)
            for name, new, computed in e.data.get("rows", ()):
                one = life(name, start)
                close(name, start)
                kind = "decode" if is_decode(new, computed, one.prompt_tokens) else "chunk"
                last = one.spans[-1] if one.spans else None
                if last is not None and last.kind == kind == "decode" and (by == "time" or last.end == start):
                    last.end, last.tokens = end, last.tokens + new
                else:
                    one.spans.append(Span(kind, start, end, new))
                since[name], state[name] = end, "running"
                if name in ending:
                    stop = ending.pop(name)
                    one.marks.append(Mark("finished", end, str(stop.data.get("reason"))))
            continue
        if not e.request_id:
            continue
        one = life(e.request_id, at)
        if e.kind == "queued":
            one.prompt_tokens = e.data.get("prompt_tokens")
            one.priority, one.tenant = e.data.get("priority", 0), e.data.get("tenant", "")
        elif e.kind == "hit":
            one.marks.append(Mark("hit", at, str(e.data.get("tokens"))))
        elif e.kind == "preempted":
            close(e.request_id, at)
            state[e.request_id] = "preempted"
            one.marks.append(Mark("preempted", at, str(e.data.get("how"))))
        elif e.kind == "finished" and _in_step(clock, e):
            ending[e.request_id] = e
        elif e.kind in STOPS:
            close(e.request_id, at)
            aborted = e.data.get("reason") == "abort"
            refused = e.kind == "refused" or e.data.get("reason") == "error"
            kind = "aborted" if aborted else "refused" if refused else "finished"
            if not (one.marks and one.marks[-1].kind == "refused"):  # said once
                one.marks.append(Mark(kind, at, str(e.data.get("reason"))))
    ended = {n for n, one in out.items() if any(m.kind in ("finished", "aborted", "refused") for m in one.marks)}
    at = max(end for _, end in map(clock.bounds, clock.steps.values()))
    for name in out:
        if name not in ended:
            close(name, at)
    return list(out.values())


def _in_step(clock: Clock, event: Event) -> bool:
    step = clock.steps.get(event.step)
    return step is not None and any(row[0] == event.request_id for row in step.data.get("rows", ()))


def steps(events: Iterable[Event], by: Axis = "step") -> list[Step]:
    """The steps of a log, in order."""
    log = list(events)
    clock = Clock(log, by)
    prompts = {e.request_id: e.data.get("prompt_tokens") for e in log if e.kind == "queued"}
    out = []
    for e in sorted(clock.steps.values(), key=lambda e: e.step):
        rows = e.data.get("rows", ())
        decode = sum(is_decode(n, computed, prompts.get(name)) for name, n, computed in rows)
        start, end = clock.bounds(e)
        blocks = [e.data.get(name) for name in ("live", "cached", "free")]
        tokens = sum(n for _, n, _ in rows)
        out.append(Step(start, end, tokens - decode, decode, len(rows), e.data["waiting"], e.data["running"], *blocks))
    return out


@dataclass(frozen=True)
class Running:
    """A row of a step. tokens: those that the request has (of the prompt, and generated) when the step begins."""

    request_id: str
    computed: int
    new: int
    tokens: int
    decode: bool


@dataclass(frozen=True)
class Queued:
    """Who waits while a step runs. preempted: it has begun before."""

    request_id: str
    tokens: int
    steps: int  # waited so far
    priority: int
    preempted: bool


@dataclass(frozen=True)
class State:
    """What a scheduler had before it when step `index` ran. held: requests that run and got nothing."""

    index: int
    queue: list[Queued]
    rows: list[Running]
    held: list[str]
    finished: list[str]
    preempted: list[str]
    hits: dict[str, int]
    step: Step


def state_at(events: Iterable[Event], index: int) -> State:
    """Step `index` of a log, counted from 0. Raises MinillmError for a step that is not there."""
    log = list(events)
    every = steps(log)
    if not 0 <= index < len(every):
        raise MinillmError(f"this log has steps 0 to {len(every) - 1}, got {index}")
    number = sorted(e.step for e in log if e.kind == "step")[index]
    first = min(e.step for e in log if e.kind == "step")
    tokens: dict[str, int] = {}
    queue: dict[str, Queued] = {}
    running: dict[str, None] = {}
    came: dict[str, tuple[int, int, int]] = {}  # step, prompt tokens, priority
    ended: set[str] = set()
    finished: list[str] = []
    preempted: list[str] = []
    hits: dict[str, int] = {}
    for e in log:
        if e.step > number:
            break
        name, now = e.request_id, e.step == number
        if e.kind == "queued":
            came[name] = (e.step, e.data.get("prompt_tokens", 0), e.data.get("priority", 0))
            tokens[name] = came[name][1]
            queue[name] = Queued(name, tokens[name], 0, came[name][2], False)
        elif e.kind == "hit" and now:
            hits[name] = hits.get(name, 0) + e.data.get("tokens", 0)
        elif e.kind == "preempted":
            running.pop(name, None)
            priority = came.get(name, (0, 0, 0))[2]
            queue[name] = Queued(name, tokens.get(name, 0), 0, priority, True)
            came[name] = (e.step, came.get(name, (0, 0, 0))[1], priority)
            preempted += [name] * now
        elif e.kind in STOPS:
            running.pop(name, None)
            queue.pop(name, None)
            finished += [name] * (now and name not in ended)
            ended.add(name)
        elif e.kind == "step":
            rows = []
            for name, new, computed in e.data.get("rows", ()):
                queue.pop(name, None)
                if name not in ended:  # who finishes says so just before its step does
                    running[name] = None
                have = max(tokens.get(name, 0), computed + new)
                decode = is_decode(new, computed, came[name][1] if name in came else None)
                rows.append(Running(name, computed, new, have, decode))
                tokens[name] = have + (computed + new == have)
            if now:
                got = {r.request_id for r in rows}
                waits = [
                    Queued(q.request_id, q.tokens, number - max(came.get(q.request_id, (number,))[0], first),
                           q.priority, q.preempted)
                    for q in queue.values()
                ]  # fmt: skip
                held = [n for n in running if n not in got]
                return State(index, waits, rows, held, finished, preempted, hits, every[index])
    raise MinillmError(f"step {index} is not in this log")  # pragma: no cover - steps() found it
