"""References and mistakes of exercise 13 for who is let in: a bounded queue, and a burst in front of it.

The learner sees a request and the load as plain dicts, since an object of the server cannot travel to where an answer
is run; `minillm.course.adapters.server` makes the same dicts in the live server.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from minillm.course.tasks import Wrong

Ask = dict[str, Any]
Queue = dict[str, Any]
Verdict = tuple[int, str, float | None] | None


class Admission:
    """The flags make the wrong ones."""

    by_places = by_waiting = counts_n = with_output = idle = with_context = proves = by_ahead = first_free = True
    knows_prompts = heeds_deadline = at_least_one = leaves_room = rounds_up = takes_turns = True
    limit_included = deadline_included = heeds_zero = shorter = True
    hopeless: Any = None
    unknown: float | None = None

    def __init__(self, max_waiting: int, max_waiting_tokens: int, max_model_len: int, longest_token: int):
        self.max_waiting, self.max_waiting_tokens = max_waiting, max_waiting_tokens
        self.max_model_len, self.longest_token = max_model_len, longest_token

    def wait(self, queue: Queue) -> float | None:
        if queue["step_s"] is None:
            return self.unknown
        mean = queue["ahead_output"] / queue["ahead"] if queue["ahead"] else 0.0
        places = sorted([*queue["running_left"], *[0.0] * (queue["max_num_seqs"] - queue["running"])])
        if not self.first_free:  # until everything has drained
            steps = (sum(places) + queue["ahead_output"]) / queue["max_num_seqs"]
        else:
            for _ in range(queue["ahead"] if self.by_ahead else queue["waiting"]):
                first = places[0] + mean if self.takes_turns else places[0]
                places = sorted([*places[1:], first])
            steps = places[0]
        return steps * queue["step_s"] + (queue["prefill_s"] if self.knows_prompts else 0.0)

    def admit(self, ask: Ask, queue: Queue) -> Verdict:
        prompt = self._prompt(ask)
        if self.with_context and prompt > self.max_model_len - self.leaves_room:
            return 400, f"the prompt has at least {prompt} tokens, the context {self.max_model_len}", self.hopeless
        inside = queue["running"] + queue["waiting"]
        free = max(0, queue["max_num_seqs"] - inside) if self.by_places else 0
        waits = max(0, (ask["n"] if self.counts_n else 1) - free)
        wait = self.wait(queue)
        if waits and (inside or not self.idle):
            tokens = waits * (prompt + ask["max_tokens"] * self.with_output)
            slack = 0 if self.limit_included else 1
            if queue["waiting"] + waits + slack > self.max_waiting:
                return 429, "the queue is full: too many wait", self._told(wait)
            if self.by_waiting and queue["waiting_tokens"] + tokens > self.max_waiting_tokens:
                return 429, "the queue is full: those that wait hold too many tokens", self._told(wait)
        deadline = ask["deadline_s"] if self.heeds_deadline else None
        deadline = deadline if deadline or self.heeds_zero else None
        if deadline is not None and wait is not None:
            late = wait > deadline if self.deadline_included else wait >= deadline
            if late:
                return 429, "it would begin after its deadline", self._told(wait - deadline * self.shorter)
        return None

    def _prompt(self, ask: Ask) -> int:
        if ask["prompt_tokens"] is not None:
            return int(ask["prompt_tokens"])
        if not self.proves:
            return int(ask["prompt_bytes"])
        return int(-(-ask["prompt_bytes"] // self.longest_token) if self.rounds_up
                   else ask["prompt_bytes"] // self.longest_token)  # fmt: skip

    def _told(self, wait: float | None) -> float:
        if wait is None:
            return 1.0
        return max(1.0, wait) if self.at_least_one else wait


class AlwaysOneSecond(Admission):
    def _told(self, wait: float | None) -> float:
        return 1.0


class NothingBeforeTokens(Admission):
    def _prompt(self, ask: Ask) -> int:
        return int(ask["prompt_tokens"] or 0)


def admission(**flags: Any) -> Any:
    return type("Admission", (Admission,), flags)


LET_IN, GRID = "let in", 4096  # GRID: moments a second in the simulation
LIMITS = (4, 1000, 512, 8)  # max_waiting, max_waiting_tokens, max_model_len, longest_token


def ask(prompt_tokens: int | None = 50, max_tokens: int = 50, **more: Any) -> Ask:
    bytes_ = more.pop("prompt_bytes", 4 * (prompt_tokens or 0))
    return {"prompt_bytes": bytes_, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "n": 1,
            "deadline_s": None} | more  # fmt: skip


def queue(
    left: Sequence[float], outputs: Sequence[float] = (), places: int = 4, step_s: float | None = 0.125, **more: Any
) -> Queue:
    """left: what each that runs has still to generate; outputs: what each that waits will generate."""
    return {
        "running": len(left), "max_num_seqs": places, "running_left": [float(x) for x in left],
        "waiting": len(outputs), "waiting_tokens": int(sum(outputs)) + 50 * len(outputs),
        "ahead": len(outputs), "ahead_output": float(sum(outputs)), "step_s": step_s, "prefill_s": 0.0,
    } | more  # fmt: skip


FULL = [40.0, 8.0, 64.0, 24.0]


def told(function: Any, cases: Sequence[tuple[Ask, Queue]]) -> Any:
    """What happens to each, in words; and when to come back, of who is refused."""
    one, said = function(*LIMITS), {}
    for i, (request, load) in enumerate(cases, 1):
        no = verdict(one.admit(request, load))
        name = f"{i}: {_asked(request)}, {_loaded(load)}"
        status, retry = no or (None, None)
        said[name] = {"it": LET_IN if no is None else f"refused with {status}", "come back after": retry}
    return said


def judged(function: Any, cases: Sequence[tuple[Ask, Queue]]) -> Any:
    """Only what happens to each: when to come back is another case's business."""
    return {name: each["it"] for name, each in told(function, cases).items()}


def waits(function: Any, queues: Sequence[Queue]) -> Any:
    one = function(*LIMITS)
    return {f"{i}: {_loaded(q)}": one.wait(q) for i, q in enumerate(queues, 1)}


def _asked(a: Ask) -> str:
    prompt = f"{a['prompt_bytes']} bytes" if a["prompt_tokens"] is None else f"{a['prompt_tokens']} tokens"
    more = "" if a["deadline_s"] is None else f" within {a['deadline_s']:g} s"
    return f"{a['n']} x ({prompt} + {a['max_tokens']}){more}"


def _loaded(q: Queue) -> str:
    left = " ".join(f"{x:g}" for x in q["running_left"]) or "nothing"
    waiting = f"{q['waiting']} wait ({q['waiting_tokens']} tokens, {q['ahead']} ahead write {q['ahead_output']:g})"
    return f"{q['running']} of {q['max_num_seqs']} run ({left} left), {waiting}"


def verdict(said: Any) -> tuple[int, float | None] | None:
    if said is None:
        return None
    if not isinstance(said, tuple | list) or len(said) != 3:
        raise Wrong(f"admit must return None or (status, message, retry_after_s), got {said!r:.80}")
    status, message, retry = said
    if not isinstance(message, str) or len(message) < 10:
        raise Wrong(f"the message must say in words why not, in at least 10 characters, got {message!r:.60}")
    return status, retry


# A burst, simulated


class Server:
    """Places, a queue in order of arrival, and a token for each place in each step. Answers use all of max_tokens."""

    def __init__(self, places: int, step_s: float):
        self.places, self.step_s = places, step_s
        self.ends: list[float] = []  # of those that run
        self.queue: list[tuple[str, Ask]] = []
        self.began: dict[str, float] = {}

    def until(self, now: float) -> None:
        """Everything that happens up to `now`."""
        self.ends.sort()
        while self.ends and self.ends[0] <= now:
            at = self.ends.pop(0)
            if self.queue:
                self._begin(*self.queue.pop(0), at)
                self.ends.sort()

    def enter(self, name: str, request: Ask, now: float) -> None:
        if len(self.ends) < self.places:
            self._begin(name, request, now)
        else:
            self.queue.append((name, request))

    def _begin(self, name: str, request: Ask, now: float) -> None:
        self.began[name] = now
        self.ends.append(now + request["max_tokens"] * self.step_s)

    def snapshot(self, now: float) -> Queue:
        left = [(end - now) / self.step_s for end in self.ends]
        outputs = [r["max_tokens"] for _, r in self.queue]
        tokens = sum(r["prompt_tokens"] + r["max_tokens"] for _, r in self.queue)
        return queue(left, outputs, self.places, self.step_s, waiting_tokens=tokens)


def burst(
    function: Any, arrivals: Sequence[tuple[float, Ask]], places: int, tries: int = 8
) -> Any:  # fmt: skip
    """Each asks when it arrives; who gets 429 comes back exactly when told. Returns the tries and the beginnings."""
    one, server, said = function(*LIMITS), Server(places, 1 / 32), dict[str, list[Any]]()
    events = [(at, i, request) for i, (at, request) in enumerate(arrivals)]
    while events:
        events.sort(key=lambda e: e[:2])
        now, i, request = events.pop(0)
        name = f"request {i}"
        server.until(now)
        no = verdict(one.admit(dict(request), server.snapshot(now)))
        said.setdefault(name, []).append((now, 200 if no is None else no[0]))
        if no is None:
            server.enter(name, request, now)
        elif no[0] == 429 and len(said[name]) < tries:
            if isinstance(no[1], bool) or not isinstance(no[1], int | float) or not 0 <= no[1] < 3600:
                raise Wrong(f"a refused request must be told when to come back, got {no[1]!r:.40}")
            # Never early, and on a grid: the last bit of a sum must not decide who of a herd is first.
            events.append((math.ceil((now + max(no[1], 1 / 1024)) * GRID - 1e-6) / GRID, i, request))
    server.until(math.inf)
    return {name: {"tries": each, "began": server.began.get(name)} for name, each in said.items()}


def arrivals(seed: int, count: int) -> Callable[[], Any]:
    """A burst within a second: far more than places and queue hold."""

    def args() -> Any:
        rng = random.Random(seed)
        made = [
            (i / 32, ask(rng.choice((20, 40, 100)), rng.choice((32, 64, 128)))) for i in range(count)
        ]  # fmt: skip
        return made, 3

    return args
