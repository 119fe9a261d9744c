"""References and typical mistakes of exercise 07 for what a graph needs: fixed buffers with padding, and replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.course.candidate import CandidateError, NotAttempted, OverTimeError
from minillm.course.checks.tiny import randn

Row = tuple[int, int, list[int]]  # token, position, block table

# 07.4 fixed buffers


def fill(
    token_ids: Tensor, positions: Tensor, slots: Tensor, context_lens: Tensor, block_tables: Tensor,
    rows: Sequence[Row], block_size: int,
) -> None:  # fmt: skip
    fill_with(token_ids, positions, slots, context_lens, block_tables, rows, block_size)


def fill_with(
    token_ids: Tensor, positions: Tensor, slots: Tensor, context_lens: Tensor, block_tables: Tensor,
    rows: Sequence[Row], block_size: int, *, padded: bool = True, slot: int = -1, context: int = 1, tails: bool = True,
    by_position: bool = False, pad_context: int = 0, last_block: bool = False,
) -> None:  # fmt: skip
    for i in range(len(token_ids)):
        if i < len(rows):
            token, position, table = rows[i]
            block = table[-1] if last_block else table[position // block_size]
            token_ids[i], positions[i] = token, position
            slots[i] = position if by_position else block * block_size + position % block_size
            context_lens[i] = position + context
            for j in range(block_tables.shape[1]):
                if j < len(table) or tails:
                    block_tables[i, j] = table[j] if j < len(table) else 0
        elif padded:
            token_ids[i] = positions[i] = 0
            slots[i], context_lens[i] = slot, pad_context
            block_tables[i] = 0


def filled(function: Any, buffers: Sequence[Tensor], steps: Sequence[Sequence[Row]], block_size: int) -> list[Tensor]:
    """The buffers after each of several steps, which all use the same ones."""
    out, buffers = [], list(buffers)
    for rows in steps:
        function(*buffers, list(rows), block_size)
        buffers = list(function.after[:5])
        out += buffers
    return out


def buffers_args(rows: int, blocks: int, block_size: int, *steps: Sequence[Row]) -> Callable[[], Any]:
    def args() -> Any:
        long = lambda: torch.full((rows,), 7, dtype=torch.int64)
        lens, tables = torch.full((rows,), 7, dtype=torch.int32), torch.full((rows, blocks), 7, dtype=torch.int32)
        return [long(), long(), long(), lens, tables], [list(s) for s in steps], block_size

    return args


# 07.5 record and replay

Call = tuple[str, list[str], str]  # function of torch, names of its inputs, name of its result
SHORT: list[Call] = [("matmul", ["x", "w"], "h"), ("tanh", ["h"], "a"), ("add", ["a", "x"], "y")]
IN_PLACE: list[Call] = [("neg_", ["x"], "r"), ("matmul", ["r", "w"], "y")]  # writes into its input, anew at each replay
LONG: list[Call] = [*SHORT, ("mul", ["y", "scale"], "z"), ("add", ["z", "x"], "out")]


class Graph:
    """Values in float64 beside the fixed tensors: what every name must hold, computed anew at each replay."""

    def __init__(self, program: Sequence[Call], inputs: dict[str, Tensor]):
        self.program = [(f, list(names), out) for f, names, out in program]
        self.memory = {name: t.clone() for name, t in inputs.items()}
        self.inputs = set(inputs)
        self.run(self.memory)

    def run(self, memory: dict[str, Tensor]) -> None:
        for function, names, out in self.program:
            result = getattr(torch, function)(*(memory[n] for n in names))
            if out in memory:
                self.keep(memory, out, result)
            else:
                memory[out] = result.clone()

    def keep(self, memory: dict[str, Tensor], name: str, result: Tensor) -> None:
        memory[name].copy_(result)

    def set(self, name: str, value: Tensor) -> None:
        here = self.memory[name]
        if here.shape != value.shape or here.dtype != value.dtype:
            raise ValueError(f"{name} is {list(here.shape)}, got {list(value.shape)}")
        here.copy_(value)

    def replay(self) -> None:
        self.run(self.memory)

    def get(self, name: str) -> Tensor:
        return self.memory[name].clone()

    def address(self, name: str) -> int:
        return self.memory[name].data_ptr()

    def around(self, name: str) -> tuple[Tensor, Tensor]:
        """Given to the learner. Results travel as copies, so only here can one see that `get` copied."""
        before = self.get(name)
        self.replay()
        return before, self.get(name)


class ReplaysOldValues(Graph):
    """`set` binds the name to a new tensor; the recorded calls go on reading the old one."""

    def __init__(self, program: Sequence[Call], inputs: dict[str, Tensor]):
        super().__init__(program, inputs)
        self.recorded = self.memory
        self.memory = dict(self.memory)

    def set(self, name: str, value: Tensor) -> None:
        if self.memory[name].shape != value.shape or self.memory[name].dtype != value.dtype:
            raise ValueError(name)
        self.memory[name] = value.clone()

    def replay(self) -> None:
        self.run(self.recorded)
        self.memory.update({out: self.recorded[out] for _, _, out in self.program})


class MovesResults(Graph):
    def keep(self, memory: dict[str, Tensor], name: str, result: Tensor) -> None:
        self.old = [*getattr(self, "old", []), memory[name]]  # so that the allocator cannot hand out the same address
        memory[name] = result.clone()


class MovesInputs(Graph):
    def set(self, name: str, value: Tensor) -> None:
        super().set(name, value)
        self.old = [*getattr(self, "old", []), self.memory[name]]
        self.memory[name] = value.clone()


class TakesAnyShape(Graph):
    def set(self, name: str, value: Tensor) -> None:
        self.memory[name].copy_(value)


class TakesAnyType(Graph):
    def set(self, name: str, value: Tensor) -> None:
        if self.memory[name].shape != value.shape:
            raise ValueError(name)
        self.memory[name].copy_(value)


class ComputesAtSet(Graph):
    def set(self, name: str, value: Tensor) -> None:
        super().set(name, value)
        self.run(self.memory)


class GetsNoCopy(Graph):
    def get(self, name: str) -> Tensor:
        return self.memory[name]


class NeverReplays(Graph):
    def replay(self) -> None:
        pass


class ReplaysTheLastCall(Graph):
    def replay(self) -> None:
        function, names, out = self.program[-1]
        self.memory[out].copy_(getattr(torch, function)(*(self.memory[n] for n in names)))


def play(kind: Any, program: Sequence[Call], inputs: dict[str, Tensor], script: Sequence[Any]) -> list[Any]:
    """What comes of a script of calls; of an address, whether it is the first one seen for that name."""
    graph = kind([(f, list(names), out) for f, names, out in program], dict(inputs))
    found: list[Any] = []
    first: dict[str, int] = {}
    for what, *args in script:
        if what == "address":
            here = graph.address(*args)
            found.append("the same address" if first.setdefault(args[0], here) == here else f"{args[0]} has moved")
        elif what == "refused":
            try:
                graph.set(*args)
                found.append("accepted")
            except (NotAttempted, OverTimeError):
                raise
            except (CandidateError, ValueError) as error:
                known = isinstance(error, ValueError) or str(error).startswith("it raised ValueError")
                found.append("ValueError" if known else str(error))
        else:
            result = getattr(graph, what)(*args)
            if what in ("get", "around"):
                found.append(result)
    return found


def graph_args(program: Sequence[Call], *script: Any) -> Callable[[], Any]:
    def args() -> Any:
        inputs = {"x": randn(1, 4, 4), "w": randn(2, 4, 4), "scale": randn(3, 4, 4)}
        used = {n for _, names, _ in program for n in names}
        return list(program), {k: v for k, v in inputs.items() if k in used}, list(script)

    return args
