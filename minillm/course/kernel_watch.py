"""What a kernel touches, judged at each load and store, before it happens. For answers that hold Triton kernels.

Under a `Watch` an interpreted kernel may touch only the tensors its launch was given: another address raises
`OutOfBounds`, naming program, tensor and element, instead of ending the process or changing somebody else's memory. An
answer's arguments are laid out with guards around them, and between rows when a check asks for a gap. The record of a
call (bytes, launches, what became of the result) goes to the grader as plain numbers; the judging is done there.

The record is made in the process of the answer. An answer that does the work in torch, or lets a dummy kernel move
bytes, is found out by it; code that takes this file's objects apart through `gc` is not (see `sandbox.py`). Such code
still gets no reference and no expected value. This file stands alone: the sandbox loads it by path, before the
submission. Lessons 04 to 08 use it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from minillm.kernels.triton_private import program, watch_launches, watch_memory

GUARD = 64  # elements on each side of an argument
SENTINEL = 77  # what stands there in tensors of whole numbers; NaN in the others


class OutOfBounds(Exception):
    """A kernel would have touched memory that belongs to none of its tensors. The text is meant for the learner."""


class Region:
    """A tensor of a launch: where it lies, and which bytes around it are not its own."""

    def __init__(self, name: str, tensor: torch.Tensor, owned: Any):
        storage = tensor.untyped_storage()
        self.name, self.itemsize, self.shape = name, tensor.element_size(), str(list(tensor.shape))
        if not tensor.is_contiguous():
            self.shape += f" with strides {list(tensor.stride())}"
        self.first, self.start = tensor.data_ptr(), storage.data_ptr()
        self.end, self.owned = self.start + storage.nbytes(), owned

    def wrong(self, addresses: Any, size: int) -> Any:
        """Which of the addresses, of elements of `size` bytes, are not this tensor's."""
        outside = (addresses < self.start) | (addresses + size > self.end)
        if self.owned is None:
            return outside
        at = np.where(outside, 0, addresses - self.start)
        return outside | ~self.owned[at]


class Watch:
    """Guards interpreted kernels while it is on, and keeps a record of the current call of an answer."""

    def __init__(self) -> None:
        self._on = contextlib.ExitStack()
        self._regions: list[Region] = []
        self.begin()

    def __enter__(self) -> Watch:
        self._on.enter_context(watch_launches(self._launch))
        self._on.enter_context(watch_memory(self._load, self._store))
        return self

    def __exit__(self, *_: object) -> None:
        self._on.close()

    # A call of an answer

    def begin(self) -> None:
        self.launches = self.loads = self.stores = self.loaded = self.stored = self.refused = self.prepared = 0
        self._placed: dict[int, tuple[Any, Any]] = {}  # start of a guarded buffer: which bytes are owned, and all bytes
        self._kept: list[torch.Tensor] = []  # tensors of launches stay alive, so that no address is used twice
        self._written: dict[int, Any] = {}  # start of a storage: which of its bytes a kernel stored
        self._after: dict[int, Any] = {}  # start of a storage: its bytes after the last launch
        self._read: dict[int, list[Any]] = {}  # itemsize: addresses
        self._stores_to: dict[int, list[Any]] = {}

    def place(self, values: list[Any], gaps: Mapping[int, int]) -> list[Any]:
        """Copies of the tensors in `values`, each inside a guarded buffer; `gaps[i]`: guards after each row of i."""
        return [self._place(v, gaps.get(i, 0)) if isinstance(v, torch.Tensor) else v for i, v in enumerate(values)]

    def _place(self, value: torch.Tensor, gap: int) -> torch.Tensor:
        if not value.dim():
            return value
        width = value.shape[-1] + gap
        rows = math.prod(value.shape[:-1])
        size = GUARD + rows * width + GUARD
        filler = math.nan if value.dtype.is_floating_point and value.element_size() > 1 else SENTINEL
        whole = torch.full((size,), filler, dtype=torch.float32).to(value.dtype)
        strides = [1]
        for n in reversed((*value.shape[1:-1], width) if value.dim() > 1 else ()):
            strides.insert(0, strides[0] * n)
        tensor = whole.as_strided(value.shape, strides, GUARD)
        tensor.copy_(value)
        owned = torch.zeros(size, dtype=torch.bool)
        owned.as_strided(value.shape, strides, GUARD).fill_(True)
        bytes_owned = owned.repeat_interleave(value.element_size()).numpy()
        self._placed[whole.data_ptr()] = (bytes_owned, _bytes(whole.untyped_storage()))
        self._kept.append(whole)
        return tensor

    def record(self, result: Any) -> dict[str, int]:
        """What the call did, as plain numbers.

        unstored   elements of the result that no kernel stored; those of an argument count only where they changed
        changed    elements that a kernel stored, and something else changed afterwards
        prepared   bytes that kernels loaded and that are neither an argument's nor stored by a kernel before
        """
        unstored = changed = 0
        arguments = {first: before for first, (_, before) in self._placed.items()}
        for tensor in [*_tensors(result), *self._kept[: len(self._placed)]]:
            if not tensor.numel():
                continue
            storage, size = tensor.untyped_storage(), tensor.element_size()
            first, now = storage.data_ptr(), _bytes(storage)
            at = torch.arange(len(now)).as_strided(
                tensor.shape, [s * size for s in tensor.stride()], tensor.storage_offset() * size
            )
            flat = at.reshape(-1).numpy()[:, None] + np.arange(size)
            stored = self._written[first][flat].all(1) if first in self._written else np.zeros(len(flat), bool)
            if first in arguments:
                unstored += int((~stored & (now[flat] != arguments[first][flat]).any(1)).sum())
            else:
                unstored += int((~stored).sum())
            if stored.any():
                changed += int((stored & (now[flat] != self._after[first][flat]).any(1)).sum())
        return {
            "launches": self.launches, "loads": self.loads, "stores": self.stores, "loaded": self.loaded,
            "stored": self.stored, "different_loaded": _different(self._read),
            "different_stored": _different(self._stores_to), "refused": self.refused, "prepared": self.prepared,
            "unstored": unstored, "changed": changed,
        }  # fmt: skip

    # Launches, loads and stores

    @contextlib.contextmanager
    def _launch(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        names = list(fn.__code__.co_varnames[: fn.__code__.co_argcount])
        given = [*zip(names, args), *kwargs.items()]
        tensors = [(name, value) for name, value in given if isinstance(value, torch.Tensor)]
        before, self._regions = self._regions, [
            Region(name, t, self._placed.get(t.untyped_storage().data_ptr(), (None,))[0]) for name, t in tensors
        ]  # fmt: skip
        self.launches += 1
        self._kept += [t for _, t in tensors]
        for region in self._regions:
            self._written.setdefault(region.start, np.zeros(region.end - region.start, bool))
        try:
            yield
        finally:
            self._regions = before
            for _, tensor in tensors:
                storage = tensor.untyped_storage()
                self._after[storage.data_ptr()] = _bytes(storage)

    def _load(self, addresses: Any, mask: Any, size: int) -> None:
        chosen = self._judged(addresses, mask, size, "loads")
        self.loads, self.loaded = self.loads + 1, self.loaded + len(chosen) * size
        self._read.setdefault(size, []).append(chosen)
        for region, mine in self._homes(chosen):
            if region.owned is None:
                self.prepared += size * int((~self._written[region.start][mine]).sum())

    def _store(self, addresses: Any, mask: Any, size: int) -> None:
        chosen = self._judged(addresses, mask, size, "stores")
        self.stores, self.stored = self.stores + 1, self.stored + len(chosen) * size
        self._stores_to.setdefault(size, []).append(chosen)
        for region, mine in self._homes(chosen):
            self._written[region.start][mine[:, None] + np.arange(size)] = True

    def _homes(self, addresses: Any) -> Iterator[tuple[Region, Any]]:
        """(region, offsets in its storage) for each storage that some addresses lie in."""
        for region in {r.start: r for r in self._regions}.values():
            inside = (addresses >= region.start) & (addresses < region.end)
            if inside.any():
                yield region, addresses[inside] - region.start

    def _judged(self, addresses: Any, mask: Any, size: int, verb: str) -> Any:
        chosen = np.broadcast_to(addresses, np.shape(mask))[np.asarray(mask, bool)].astype(np.int64)
        wrong = np.ones(len(chosen), bool)
        for region in self._regions:
            wrong &= region.wrong(chosen, size)
        if wrong.any():
            self.refused += 1
            raise OutOfBounds(self._sentence(int(chosen[wrong][0]), int(wrong.sum()), np.size(mask), verb))
        return chosen

    def _sentence(self, address: int, count: int, lanes: int, verb: str) -> str:
        who = f"program {program()} {verb} {count} of its {lanes} elements outside every tensor of the launch"
        if not self._regions:
            return f"{who}: it was given no tensor"
        near = min(self._regions, key=lambda r: max(r.first - address, address - r.end, 0))
        element = (address - near.first) // near.itemsize
        return f"{who}; the first is {near.name} + {element}, and {near.name} is {near.shape}. Is a mask missing?"


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def _bytes(storage: torch.UntypedStorage) -> Any:
    return torch.tensor([], dtype=torch.uint8).set_(storage).numpy().copy()


def _different(parts: dict[int, list[Any]]) -> int:
    return sum(len(np.unique(np.concatenate(found))) * size for size, found in parts.items())
