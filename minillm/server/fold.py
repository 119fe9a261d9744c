"""From what the engine did to what each request felt: a pure fold over the event log. Lesson 13 builds it.

`observe(log)` turns a saved log into one `Observed` a request; a live server feeds a `Fold` event by event and keeps
nothing but the requests under way. Nothing here knows HTTP, Prometheus or a clock: the same events give the same
numbers, live or a year later.

How a token is seen. A step's row [request, new tokens, computed before] draws a token if and only if it reaches the
request's last token: computed before + new = prompt + outputs so far. That holds for a chunk of a prompt, a token of a
stream and a request that computes everything again after a preemption. The first token has an event of its own, and
"finished" comes before the "step" event of the step that ends a request, so its count of tokens tells of the last.

A token's time is that of its own event where it has one (the first, the last), and the end of its step otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minillm.events import Event


@dataclass(slots=True, eq=False)
class Observed:
    """One request, as the log tells it. Times in seconds of the log's clock, None for what has not happened.

    arrival       when the request was made, or, in a log that does not say, when the engine's thread queued it
    scheduled     begin of the first step that computed something for it
    last_token    of the last token so far
    cached_tokens of the prompt, found in a prefix cache or tier at the first admission
    gaps          between tokens, in seconds; empty unless the fold keeps them
    """

    request_id: str
    tenant: str
    prompt_tokens: int
    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    finish_reason: str | None = None
    generation_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    gaps: list[float] = field(default_factory=list)
    _hit: int = 0  # tokens found, not computed, since its latest admission
    _told: bool = False  # that it has ended

    @property
    def queue_s(self) -> float | None:
        """Waiting before it began. None for one that never did."""
        return _between(self.arrival, self.scheduled)

    @property
    def waited_s(self) -> float | None:
        """As queue_s; and for one that ended before it began, all of its time: else the longest waits went unseen."""
        return self.queue_s if self.scheduled is not None else _between(self.arrival, self.finished)

    @property
    def prefill_s(self) -> float | None:
        return _between(self.scheduled, self.first_token)

    @property
    def decode_s(self) -> float | None:
        return _between(self.first_token, self.last_token)

    @property
    def inference_s(self) -> float | None:
        return _between(self.scheduled, self.last_token)

    @property
    def ttft_s(self) -> float | None:
        return _between(self.arrival, self.first_token)

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - 1), as vLLM defines it. None for fewer than two tokens."""
        if self.generation_tokens < 2 or self.decode_s is None:
            return None
        return self.decode_s / (self.generation_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        return _between(self.arrival, self.finished)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


class Fact(NamedTuple):
    """What an event adds.

    kind         request   value                             label
    queued       yes       -                                 -
    refused      -         -                                 field at fault
    hit          yes       tokens found, first admission     source: prefix, host, disk
    preempted    yes       tokens whose KV was given up      how: swap, cached, recompute
    first_token  yes       TTFT, seconds                     -
    gap          yes       seconds since the token before    -
    ended        yes       -                                 finish reason
    began        yes       -                                 -          first row of a request
    step         -         tokens computed                   -
    reused       -         KV a step read that the same requests had computed before, in tokens  -
    """

    kind: str
    request: Observed | None = None
    value: float = 0.0
    label: str = ""


class Fold:
    """feed(event) gives the facts that it adds. State: the requests under way, and nothing else.

    An id that was never queued here (a log that begins in the middle) is ignored. Who ends in a step is kept until that
    step's event, which holds its last row; one that began in that very step is told then, since only the event says
    when it began. `flush` gives those up.
    """

    def __init__(self, keep_gaps: bool = False):
        self.under_way: dict[str, Observed] = {}
        self._leaving: dict[str, Observed] = {}
        self._keep_gaps = keep_gaps

    def feed(self, event: Event) -> list[Fact]:
        if event.kind == "step":
            return self._step(event)
        facts = self.flush() if self._leaving and event.kind in ("queued", "preempted", "hit") else []
        data = event.data
        if event.kind == "queued":
            arrival = data.get("arrival")
            r = Observed(
                event.request_id, str(data.get("tenant") or ""), int(data.get("prompt_tokens") or 0),
                event.time if arrival is None else arrival,
            )  # fmt: skip
            self.under_way[event.request_id] = r
            facts.append(Fact("queued", r))
            return facts
        if event.kind == "refused":
            facts.append(Fact("refused", label=str(data.get("field", ""))))
            return facts
        known = self.under_way.get(event.request_id)
        if known is not None:
            facts += self._own(known, event)
        return facts

    def flush(self, before: float = float("inf")) -> list[Fact]:
        """Let go of those who wait for the event of their last step: it failed, or was interrupted. before: a time."""
        gone = [name for name, r in self._leaving.items() if r.finished is not None and r.finished < before]
        return [self._ended(r) for name in gone if not (r := self._leaving.pop(name))._told]

    def _own(self, r: Observed, event: Event) -> list[Fact]:
        """An event of a request under way."""
        data = event.data
        if event.kind == "hit":
            tokens = int(data.get("tokens", 0))
            r._hit += tokens
            if r.preemptions or r.scheduled is not None:
                return []  # it comes back: no second query
            if data.get("source") == "transfer":  # another engine computed it for this request, all but `cached`
                r.cached_tokens += int(data.get("cached", 0))
                return []
            r.cached_tokens += tokens
            return [Fact("hit", r, tokens, str(data.get("source", "")))]
        if event.kind == "preempted":
            r.preemptions += 1
            r._hit = 0
            return [Fact("preempted", r, int(data.get("computed", 0)), str(data.get("how", "")))]
        if event.kind == "first_token":
            r.first_token = r.last_token = event.time
            r.generation_tokens = 1  # before its row: that then reaches prompt + 0, and counts nothing again
            return [Fact("first_token", r, r.ttft_s or 0.0)]
        if event.kind != "finished":
            return []
        facts = []
        if int(data.get("output_tokens", 0)) > r.generation_tokens:
            facts += self._token(r, event)
        del self.under_way[event.request_id]
        r.finished, r.finish_reason = event.time, str(data.get("reason"))
        if r.finish_reason != "abort":  # that comes between steps, or before one has begun
            self._leaving[event.request_id] = r
            if r.scheduled is None:
                return facts
        return [*facts, self._ended(r)]

    def _token(self, r: Observed, event: Event) -> list[Fact]:
        before, r.last_token = r.last_token, event.time
        r.generation_tokens += 1
        if before is None:
            return []
        gap = event.time - before
        if self._keep_gaps:
            r.gaps.append(gap)
        return [Fact("gap", r, gap)]

    def _ended(self, r: Observed) -> Fact:
        r._told = True
        return Fact("ended", r, label=r.finish_reason or "")

    def _step(self, event: Event) -> list[Fact]:
        data, facts = event.data, []
        begun = event.time - float(data.get("seconds", 0.0))
        computed = reused = 0
        for name, n, before in data.get("rows", ()):
            computed += n
            r = self.under_way.get(name) or self._leaving.get(name)
            if r is None:
                continue
            if r.scheduled is None:
                r.scheduled = max(r.arrival, begun if r.first_token is None else min(begun, r.first_token))
                facts.append(Fact("began", r))
            reused += max(0, before - r._hit)
            if r.finished is None and before + n == r.prompt_tokens + r.generation_tokens:
                facts += self._token(r, event)
        facts += self.flush()
        facts.append(Fact("step", value=computed))
        facts.append(Fact("reused", value=reused))
        return facts


def observe(events: Iterable[Event]) -> list[Observed]:
    """Every request that was queued and has ended in the log, in the order in which they ended, with all gaps."""
    return [f.request for f in facts(events, keep_gaps=True) if f.kind == "ended" and f.request is not None]


def facts(events: Iterable[Event], **options: Any) -> Iterator[Fact]:
    """All facts of a log, in order. options: as for `Fold`."""
    fold = Fold(**options)
    for e in events:
        yield from fold.feed(e)
    yield from fold.flush()
