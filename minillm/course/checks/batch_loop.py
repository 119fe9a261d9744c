"""References and typical mistakes of exercise 09: the step loop, and a simulator that knows only lengths.

Apart from solutions/ and the engine. `World` is what the loop drives: it looks at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from minillm.course.candidate import CandidateError
from minillm.course.tasks import Wrong

# 09.4 the step loop

END = 0
PATIENCE = 60  # steps; no case needs as many


def run(
    requests: dict[str, Any], schedule: Any, forward: Any, sample: Any, finish: Any, free: Any
) -> dict[str, list[int]]:
    return run_with(requests, schedule, forward, sample, finish, free)


def run_with(
    requests: dict[str, Any], schedule: Any, forward: Any, sample: Any, finish: Any, free: Any, *, twice: bool = False,
    seat: bool = False, eager: bool = False, keeps_end: bool = True, shift: int = 0,
    no_free: bool = False, one_seed: bool = False, short: int = 0,
) -> dict[str, list[int]]:  # fmt: skip
    """The step loop; the switches are the mistakes by name."""
    made: dict[str, list[int]] = {name: [] for name in requests}
    computed = dict.fromkeys(requests, 0)
    open_ = set(requests)
    for _ in range(400):
        if not open_:
            break
        rows, given = schedule(), []
        for name, n in rows:
            tokens = requests[name][0] + made[name]
            given.append((name, tokens[computed[name] : computed[name] + n], computed[name]))
        scores = forward(given)
        for i, ((name, n), row) in enumerate(zip(rows, scores, strict=True)):
            prompt, max_tokens, seed = requests[name]
            computed[name] += n
            position = len(prompt) + len(made[name])
            if name not in open_ or (computed[name] < position and not eager):
                continue
            token = sample(row, 0 if one_seed else seed, i if seat else position + shift)
            if keeps_end or token != END:
                made[name].append(token)
            if token == END or len(made[name]) == max_tokens - short:
                open_.discard(name)
                for _ in range(1 + twice):
                    finish(name)
                    if not no_free:
                        free(name)
    return made


class World:
    """What the loop drives: a batch, scores that stand for a prefix, and a look at each call."""

    def __init__(self, requests: dict[str, Any], chunk: int, seats: int):
        self.requests, self.chunk, self.seats = requests, chunk, seats
        self.waiting, self.batch = list(requests), []  # type: ignore[var-annotated]
        self.tokens = {name: list(prompt) for name, (prompt, _, _) in requests.items()}
        self.computed = dict.fromkeys(requests, 0)
        self.said: list[str] = []
        self.freed: list[str] = []
        self.ended: list[str] = []
        self.rows: dict[tuple[int, ...], str] = {}
        self.steps = 0

    def over(self, name: str) -> bool:
        """Whether the request has drawn its last token, whatever the loop makes of it."""
        prompt, most, _ = self.requests[name]
        drawn = self.tokens[name][len(prompt) :]
        return len(drawn) >= most or END in drawn

    def schedule(self) -> list[tuple[str, int]]:
        if self.steps > PATIENCE:  # the loop has not told who ended: the others must not wait for ever
            self.batch = [n for n in self.batch if not self.over(n)]
        while self.waiting and len(self.batch) < self.seats:
            self.batch.append(self.waiting.pop(0))
        return [(n, min(self.chunk, max(1, len(self.tokens[n]) - self.computed[n]))) for n in self.batch]

    def forward(self, given: list[Any]) -> list[list[int]]:
        self.steps += 1
        self.rows = {}
        out: list[list[int]] = []
        for name, tokens, start in given:
            if self.over(name):
                self.say(
                    f"{name} has ended and is computed again",
                    "it ends with END, or with max_tokens tokens; tell the scheduler, or it is kept in the batch",
                )
            if name in self.freed:
                self.say(f"the blocks of {name} were freed, and then read", "free after `forward`, not before")
            if (tokens, start) != (self.tokens[name][start : start + len(tokens)], self.computed[name]):
                self.say(
                    f"step {self.steps}: {name} is {self.tokens[name]}, {self.computed[name]} computed; forward got "
                    f"{tokens} at {start}", "the counter moves by all tokens of the row",
                )  # fmt: skip
            self.computed[name] = start + len(tokens)
            out.append([sum((i + 1) * t for i, t in enumerate(self.tokens[name][: self.computed[name]])), len(out)])
            self.rows[tuple(out[-1])] = name
        return out

    def sample(self, scores: list[int], seed: int, position: int) -> int:
        name = self.rows.get(tuple(scores), "")
        token = 1 + (7 * scores[0] + 13 * seed + 5 * position) % 9
        prompt = self.requests[name][0] if name else []
        if name and len(self.tokens[name]) - len(prompt) == STOPS.get(name, -1):
            token = END
        if name:
            self.tokens[name].append(token)
        return token

    def finish(self, name: str) -> None:
        self.ended.append(name)
        if name in self.batch:
            self.batch.remove(name)

    def free(self, name: str) -> None:
        self.freed.append(name)

    def say(self, text: str, hint: str) -> None:
        if not self.said:
            self.said = [text, hint]


STOPS = {"stops": 2}  # tokens after which a request draws END


def loop_play(function: Any, requests: dict[str, Any], chunk: int, seats: int) -> list[Any]:
    """Outputs, how often each was finished and freed, and the steps it took. Raises Wrong for a fault on the way."""
    world = World(requests, chunk, seats)
    got: Any = None
    try:
        got = function(requests, world.schedule, world.forward, world.sample, world.finish, world.free)
    except CandidateError:
        if not world.said:
            raise
    if world.said:
        raise Wrong(*world.said)
    return [got, [(n, world.ended.count(n), world.freed.count(n)) for n in requests], world.steps]


def loop_args(
    *requests: tuple[str, list[int], int, int], chunk: int = 99, seats: int = 2
) -> Callable[[], tuple[dict[str, Any], int, int]]:
    return lambda: ({name: (list(prompt), most, seed) for name, prompt, most, seed in requests}, chunk, seats)


# 09.5 steps from lengths


def last_steps(lengths: Sequence[int], seats: int, continuous: bool) -> list[int]:
    return last_steps_with(lengths, seats, continuous)


def last_steps_with(
    lengths: Sequence[int], seats: int, continuous: bool, *, first: int = 1, gap: int = 0, by_group: bool = False,
    shortest: bool = False, only: str = "",
) -> list[int]:  # fmt: skip
    """Step by step. first: number of the first step; gap: steps that a place stays empty; only: one way for both."""
    continuous = {"": continuous, "static": False, "continuous": True}[only]
    order = sorted(range(len(lengths)), key=lambda i: lengths[i]) if shortest else list(range(len(lengths)))
    ends = [0] * len(lengths)
    if not continuous:
        start = 0
        for i in range(0, len(order), seats):
            group = order[i : i + seats]
            longest = max(lengths[j] for j in group)
            for j in group:
                ends[j] = start + (longest if by_group else lengths[j]) - 1 + first
            start += longest
        return ends
    free = [0] * seats
    for j in order:
        seat = free.index(min(free))
        ends[j] = free[seat] + lengths[j] - 1 + first
        free[seat] += lengths[j] + gap
    return ends


def both(function: Any, cases: Sequence[tuple[Sequence[int], int]]) -> list[list[int]]:
    """Static and continuous of several inputs: a constant must not earn points."""
    return [list(function(list(lengths), seats, how)) for lengths, seats in cases for how in (False, True)]


def one_way(function: Any, cases: Sequence[tuple[Sequence[int], int]], continuous: bool) -> list[list[int]]:
    return [list(function(list(lengths), seats, continuous)) for lengths, seats in cases]


static_way, continuous_way = partial(one_way, continuous=False), partial(one_way, continuous=True)
