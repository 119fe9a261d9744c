"""References and typical mistakes of exercise 10: a step's tokens, a mixed batch, a chunked scheduler, a budget.

Two passes over lists in place of one with a reserve, and apart from solutions/ and the engine. `chunked_part` is what
mounts the learner's scheduler in an engine; lesson and exercise use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.cache.paged import PagedCache
from minillm.course.checks.scheduler_part import SchedulerPart
from minillm.course.checks.shadows import Game, first_fault
from minillm.course.tasks import Wrong
from minillm.errors import MinillmError
from minillm.events import EventLog
from minillm.policy import SchedulerPolicy
from minillm.scheduler import Limits, SchedulerOutput

# 10.2 the tokens of a step


def plan_step(missing: Sequence[int], budget: int) -> list[int]:
    return plan_with(missing, budget)


def plan_with(missing: Sequence[int], budget: int, *, kind: str = "right") -> list[int]:
    """The tokens of each. `kind` names the mistake."""
    given = [0] * len(missing)
    streams = [i for i, n in enumerate(missing) if n == 1]
    prompts = [i for i, n in enumerate(missing) if n > 1]
    left = budget
    if kind == "in order":
        order = list(range(len(missing)))
    elif kind == "prompts first":
        order = prompts + streams
    elif kind == "shortest first":
        order = streams + sorted(prompts, key=lambda i: missing[i])
    else:
        order = streams + prompts
    for i in order:
        n = min(missing[i], left)
        if kind == "whole" and missing[i] > left:
            n = 0
        elif kind == "equal" and missing[i] > 1:
            n = min(missing[i], (budget - min(budget, len(streams))) // len(prompts))
        elif kind == "budget each" and missing[i] > 1:
            given[i] = min(missing[i], max(0, budget - len(streams)))
            continue
        elif kind == "streams free" and missing[i] == 1:
            given[i] = 1
            continue
        elif kind == "one prompt" and missing[i] > 1 and any(given[j] for j in prompts):
            n = 0
        elif kind == "fills" and missing[i] > 1:
            n = left
        given[i] = n
        left -= n
    return given


def plans(answer: Any, inputs: Sequence[tuple[Sequence[int], int]]) -> list[list[int]]:
    """Several steps in one case: a constant must not earn points."""
    return [list(answer(list(missing), budget)) for missing, budget in inputs]


def whole_run(answer: Any, missing: Sequence[int], budget: int) -> list[list[int]]:
    """Step after step until the last prompt is done; who is done with its prompt is behind by one from then on."""
    behind, out = list(missing), []
    while any(n > 1 for n in behind):
        given = list(answer(list(behind), budget))
        out.append(given)
        if len(given) != len(behind) or len(out) > 60:
            break
        behind = [max(1, n - g) for n, g in zip(behind, given, strict=True)]
    return out


# 10.3 a mixed batch


Row = tuple[Sequence[int], int, int, int]  # block table, tokens before, new ones, missing ones


def flat_batch(rows: Sequence[Row], block_size: int) -> dict[str, Any]:
    return batch_with(rows, block_size)


def batch_with(
    rows: Sequence[Row], block_size: int, *, reset: bool = False, reads: str = "causal", last: str = "complete",
    writes_reset: bool = False, logical: bool = False, off_by_one: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The switches are the mistakes by name."""
    out: dict[str, Any] = {"positions": [], "slots": [], "reads": [], "logits": []}
    for table, start, new, missing in rows:
        places = [b * block_size + i for b in (range(len(table)) if logical else table) for i in range(block_size)]
        for i in range(new):
            p = start + i
            out["positions"].append(i if reset else p + off_by_one)
            out["slots"].append(places[i if writes_reset else p])
            out["reads"].append(
                {
                    "causal": places[: p + 1], "no offset": places[: i + 1], "chunk only": places[start : p + 1],
                    "future": places[: start + new], "not itself": places[:p],
                }[reads]
            )  # fmt: skip
        if last == "every row" or new == missing:
            out["logits"].append(new - 1 if last == "in its row" else len(out["positions"]) - 1)
    return out


def batches(answer: Any, inputs: Sequence[tuple[Sequence[Row], int]], part: str) -> list[Any]:
    """One part of the answer for several batches."""
    got = [answer([(list(t), s, n, m) for t, s, n, m in rows], size) for rows, size in inputs]
    for one in got:
        if not isinstance(one, dict) or part not in one:
            raise Wrong(f"expected a dict with the key {part!r}, got {one!r:.80}")
    return [one[part] for one in got]


# 10.4 a scheduler


class ChunkedScheduler:
    """Two sorted lists of (key, number, name)."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int):
        self.most, self.budget, self.made = max_num_seqs, max_num_batched_tokens, 0
        self.queue: list[tuple[float, int, str]] = []
        self.batch: list[tuple[float, int, str]] = []

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def running(self) -> list[str]:
        return [e[2] for e in self.batch]

    def add(self, name: str, key: float) -> None:
        self.made += 1
        self.queue = sorted([*self.queue, (key, self.made, name)])

    def finish(self, name: str) -> None:
        self.queue = [e for e in self.queue if e[2] != name]
        self.batch = [e for e in self.batch if e[2] != name]

    def schedule(self, behind: Callable[[str], int], room: Callable[[str], bool]) -> list[tuple[str, int]]:
        names = self.running
        given = self.plan([behind(name) for name in names])
        rows = [(name, n) for name, n in zip(names, given, strict=True) if n]
        return rows + self.admit(behind, room, self.budget - sum(given))

    def plan(self, missing: list[int]) -> list[int]:
        return plan_with(missing, self.budget)

    def admit(self, behind: Any, room: Any, left: int) -> list[tuple[str, int]]:
        rows = []
        while left > 0 and self.queue and len(self.batch) < self.most and room(self.queue[0][2]):
            entry = self.queue.pop(0)
            self.batch = sorted([*self.batch, entry])
            rows.append((entry[2], min(left, behind(entry[2]))))
            left -= rows[-1][1]
        return rows


class PromptsFirst(ChunkedScheduler):
    def plan(self, missing: list[int]) -> list[int]:
        return plan_with(missing, self.budget, kind="prompts first")


class NothingSetAside(ChunkedScheduler):
    def plan(self, missing: list[int]) -> list[int]:
        return plan_with(missing, self.budget, kind="in order")


class StreamsAreFree(ChunkedScheduler):
    def plan(self, missing: list[int]) -> list[int]:
        return plan_with(missing, self.budget, kind="streams free")


class NoChunks(ChunkedScheduler):
    """A prompt waits until it fits as a whole."""

    def plan(self, missing: list[int]) -> list[int]:
        return plan_with(missing, self.budget, kind="whole")


class AdmitsFirst(ChunkedScheduler):
    """Newcomers take the budget before those who run."""

    def schedule(self, behind: Callable[[str], int], room: Callable[[str], bool]) -> list[tuple[str, int]]:
        before = self.running
        rows = self.admit(behind, room, self.budget)
        given = plan_with([behind(name) for name in before], self.budget - sum(n for _, n in rows))
        return rows + [(name, n) for name, n in zip(before, given, strict=True) if n]


class WholeNewcomers(ChunkedScheduler):
    """The first chunk of a newcomer is its whole prompt."""

    def admit(self, behind: Any, room: Any, left: int) -> list[tuple[str, int]]:
        return [(name, behind(name)) for name, _ in super().admit(behind, room, left)]


class OneNewcomer(ChunkedScheduler):
    def admit(self, behind: Any, room: Any, left: int) -> list[tuple[str, int]]:
        most, self.most = self.most, min(self.most, len(self.batch) + 1)
        rows = super().admit(behind, room, left)
        self.most = most
        return rows


class WaitsForQuiet(ChunkedScheduler):
    """Nobody is admitted while a prompt is under way."""

    def admit(self, behind: Any, room: Any, left: int) -> list[tuple[str, int]]:
        return [] if any(behind(name) > 1 for name in self.running) else super().admit(behind, room, left)


class ForgetsSeats(ChunkedScheduler):
    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int):
        super().__init__(max_num_seqs + 100, max_num_batched_tokens)


class AdmitsWithNothing(ChunkedScheduler):
    """Admits when the budget is spent: blocks are held and nothing is computed."""

    def admit(self, behind: Any, room: Any, left: int) -> list[tuple[str, int]]:
        rows = super().admit(behind, room, left)
        while self.queue and len(self.batch) < self.most and room(self.queue[0][2]):
            self.batch = sorted([*self.batch, self.queue.pop(0)])
        return rows


def chunked_play(kind: Any, seats: int, budget: int, script: Sequence[tuple[Any, ...]], blocks: int = 1000) -> Any:
    """What a scheduler says. ("add", name, key, tokens[, blocks]), ("steps", n), ("finish", name).

    A step says who gets how many tokens (sorted by name), who runs behind it, and how many wait.
    """
    scheduler = kind(seats, budget)
    behind: dict[str, int] = {}
    need: dict[str, int] = {}
    held: dict[str, int] = {}
    said: list[Any] = []

    def room(name: str) -> bool:
        if name not in held and sum(held.values()) + need[name] > blocks:
            return False
        held[name] = need[name]
        return True

    for what, *args in script:
        if what == "add":
            behind[args[0]], need[args[0]] = args[2], args[3] if len(args) > 3 else 1
            scheduler.add(args[0], args[1])
        elif what == "finish":
            scheduler.finish(args[0])
            held.pop(args[0], None)
            behind.pop(args[0])
        else:
            for _ in range(args[0]):
                rows = [tuple(row) for row in scheduler.schedule(behind.__getitem__, room)]
                for name, n in rows:
                    behind[name] = max(1, behind[name] - n)
                said.append([sorted(rows), list(scheduler.running), int(scheduler.num_waiting)])
    return said


class ChunkedPart(SchedulerPart):
    """A learner's chunked scheduler in an engine. Its laws are looked at in every step, and told in words."""

    def __init__(self, mine: Any, cache: PagedCache, policy: SchedulerPolicy, limits: Limits):
        super().__init__(mine, cache, policy)
        self.budget = limits.max_num_batched_tokens

    def schedule(self) -> SchedulerOutput:
        out = super().schedule()
        got = dict(out.rows)
        total = sum(got.values())
        if total > self.budget:
            raise MinillmError(f"the step has {total} tokens, and the budget is {self.budget}")
        running = self.running
        streams = [r for r in running if r.num_new_tokens == 1]
        if len(streams) <= self.budget and (starved := [r for r in streams if r not in got]):
            raise MinillmError(
                f"request {starved[0].request_id} is behind by one token and gets none in a step of {total} tokens "
                f"(budget {self.budget}): a frozen stream"
            )
        idle = [r for r in running if got.get(r, 0) < r.num_new_tokens]
        if total < self.budget and idle:
            raise MinillmError(
                f"{self.budget - total} tokens of the budget are left, and request {idle[0].request_id} is behind by "
                f"{idle[0].num_new_tokens} and gets {got.get(idle[0], 0)}"
            )
        return out


def chunked_part(kind: Callable[[int, int], Any]) -> Callable[..., ChunkedPart]:
    """What `parts["scheduler"]` takes, around kind(max_num_seqs, max_num_batched_tokens)."""

    def make(cache: PagedCache, policy: SchedulerPolicy, limits: Limits, events: EventLog) -> ChunkedPart:
        return ChunkedPart(kind(limits.max_num_seqs, limits.max_num_batched_tokens), cache, policy, limits)

    return make


def schedules(kind: Any, seeds: Sequence[int], roomy: bool) -> str:
    """Random schedules over a shadow: "" for a scheduler that does what it must."""
    fault = first_fault(seeds, Game(steps=30, roomy=roomy, full=False), scheduler=chunked_part(kind))
    if fault and not kind.reference:
        raise Wrong(fault)
    return fault


# 10.5 a budget


def choose_budget(seconds: Callable[[int, int], float], streams: int, target: float, most: int) -> int:
    return choose_with(seconds, streams, target, most)


def choose_with(
    seconds: Callable[[int, int], float], streams: int, target: float, most: int, *, kind: str = "right"
) -> int:
    """By trying every budget from the largest down; `kind` names the mistake."""
    fits = {
        "strict": lambda b: seconds(streams, b - streams) < target,
        "streams beside": lambda b: seconds(streams, b) <= target,
        "no streams": lambda b: seconds(0, b) <= target,
    }.get(kind, lambda b: seconds(streams, b - streams) <= target)
    best = next((b for b in range(most, streams, -1) if fits(b)), streams + 1)
    if kind == "chunk":
        return best - streams
    if kind == "one more":
        return min(most, best + 1)
    if kind == "no floor" and best == streams + 1 and not fits(best):
        return 0
    if kind == "power of two":
        return int(2 ** (best.bit_length() - 1))
    return best


def chosen(answer: Any, inputs: Sequence[tuple[float, float, float, int, float, int]]) -> list[int]:
    """Budgets for several machines: (seconds a step, a stream, a prompt token, streams, target, most)."""
    out = []
    for base, each, token, streams, target, most in inputs:
        cost = _Machine(base, each, token)
        out.append(int(answer(cost, streams, target, most)))
    return out


def asked(answer: Any, most: int) -> str:
    """How often the cost function is asked for a large range of budgets."""
    machine = _Machine(0.01, 0.0001, 0.00013)
    budget = answer(machine, 16, 0.3, most)
    if getattr(answer, "reference", False):
        return "few calls"
    limit = 2 * most.bit_length() + 4
    if machine.calls > limit:
        raise Wrong(
            f"seconds() was asked {machine.calls} times to choose {budget} of at most {most} budgets; {limit} are "
            "enough",
            "the seconds only grow with the budget: halve the range each time",
        )
    return "few calls"


class _Machine:
    """Seconds of a step: it reads the weights, then each stream, then each prompt token. Counts its calls."""

    def __init__(self, base: float, each: float, token: float):
        self.base, self.each, self.token, self.calls = base, each, token, 0

    def __call__(self, streams: int, chunk: int) -> float:
        self.calls += 1
        return self.base + self.each * streams + self.token * chunk
