"""KV out of a prefill engine while it computes, each layer's as soon as the layer is done. Lesson 15.

The engine's attention backend is wrapped: when a layer's attention returns, its keys and values are in the pool, and
those of the tokens that somebody else waits for are copied out. The next layers are computed while they travel. Tokens
that were found in the prefix cache are not computed, and go out with the first chunk that is. What the wrapper cannot
see (a CUDA graph, the layers of other ranks) is copied when the step has retired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from minillm.cache.pool import KVPool
from minillm.cluster.layout import to_token_pieces
from minillm.request import Request

MAX_PIECE_BYTES = 32 << 20  # a long hit of the prefix cache is more, and would be more than a message may carry


class Tokens(NamedTuple):
    """KV of tokens start to start + count of one layer: [count, K, d] and so on, see `KVPool.read_tokens`."""

    layer: int
    start: int
    tensors: list[Tensor]

    @property
    def count_tokens(self) -> int:
        return int(self.tensors[0].shape[0])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


@dataclass
class Followed:
    """A request whose first `num_tokens` tokens' KV somebody waits for. The callbacks are the engine thread's, inside a
    step: started() before the first one, produced(tokens) for each piece, computed() after the last, failed(error)."""

    num_tokens: int
    started: Callable[[], None]
    produced: Callable[[Tokens], None]
    computed: Callable[[], None]
    failed: Callable[[Exception], None]
    exported: list[int] = field(default_factory=list)  # tokens of each layer
    begun: bool = False


class Exporter:
    """Wraps the runner of a paged engine, until `close`. All methods are the engine thread's."""

    def __init__(self, engine: Any):
        self._core = engine.core
        self.pool = engine.cache.pool
        self.num_layers = len(self.pool.k) if isinstance(self.pool, KVPool) else self.pool.config.num_layers
        self.runner = engine.core.runner
        self._followed: dict[Request, Followed] = {}
        self._step: list[tuple[Request, Followed, int]] = []  # of the step under way, and how far each gets
        if isinstance(self.pool, KVPool):
            self.runner.attention = Tap(self.runner.attention, self._after_layer)
        engine.core.runner = self

    def close(self) -> None:
        """The engine is as before."""
        self._followed.clear()
        if self._core.runner is self:
            self._core.runner = self.runner
            self.runner.attention = getattr(self.runner.attention, "inner", self.runner.attention)

    def follow(self, request: Request, followed: Followed) -> None:
        followed.exported = [0] * self.num_layers
        self._followed[request] = followed

    def forget(self, request: Request) -> None:
        self._followed.pop(request, None)

    # As a runner

    def start(self, requests: Sequence[Request]) -> None:
        self.runner.start(requests)

    def finish(self, request: Request) -> None:
        self.runner.finish(request)

    def forward(self, requests: Sequence[Request], num_new: Sequence[int] | None = None) -> Tensor:
        if not self._followed:
            return self.runner.forward(requests, num_new)
        counts = [r.num_new_tokens for r in requests] if num_new is None else num_new
        self._step = [
            (r, f, min(r.num_computed_tokens + n, f.num_tokens))
            for r, n in zip(requests, counts, strict=True) if (f := self._followed.get(r)) is not None
        ]  # fmt: skip
        for r, f, _ in self._step:
            if not f.begun:
                f.begun = True
                self._told(r, f, f.started)
        try:
            out = self.runner.forward(requests, num_new)
            self._after_step()
        finally:
            self._step = []
        return out

    def _after_layer(self, layer: int) -> None:
        for r, f, end in self._step:
            start = f.exported[layer]
            if end > start and r in self._followed:
                self._told(r, f, lambda r=r, f=f, start=start, end=end: self._copy(r, f, layer, start, end))  # type: ignore[misc]

    def _copy(self, request: Request, f: Followed, layer: int, start: int, end: int) -> None:
        tensors = self.pool.read_tokens(layer, request.block_ids, start, end - start)
        self._hand_on(f, layer, start, tensors)

    def _hand_on(self, f: Followed, layer: int, start: int, tensors: Sequence[Tensor]) -> None:
        count = int(tensors[0].shape[0])
        f.exported[layer] = start + count
        step = max(1, MAX_PIECE_BYTES // sum(t[0].nbytes for t in tensors))
        for i in range(0, count, step):
            f.produced(Tokens(layer, start + i, [t[i : i + step] for t in tensors]))

    def _after_step(self) -> None:
        for r, f, end in self._step:
            if r in self._followed and min(f.exported) < end:
                self._told(r, f, lambda r=r, f=f, end=end: self._sweep(r, f, end))  # type: ignore[misc]
            if r in self._followed and min(f.exported) >= f.num_tokens:
                self._followed.pop(r)
                self._told(r, f, f.computed)

    def _sweep(self, request: Request, f: Followed, end: int) -> None:
        """What no wrapper saw."""
        if isinstance(self.pool, KVPool):
            for layer, start in enumerate(f.exported):
                if start < end:
                    self._copy(request, f, layer, start, end)
            return
        size, start = self.pool.block_size, min(f.exported)
        first = start // size
        blocks = self.pool.read_blocks(request.block_ids[first : -(-end // size)])
        for layer, tensors in enumerate(to_token_pieces(blocks, end - first * size)):
            self._hand_on(f, layer, start, [t[start - first * size :].contiguous() for t in tensors])

    def _told(self, request: Request, f: Followed, tell: Callable[[], None]) -> None:
        """The step is others' too: what goes wrong here ends this export, and nothing else."""
        try:
            tell()
        except Exception as error:
            self._followed.pop(request, None)
            f.failed(error)


class Tap:
    """An attention backend, and after(layer) behind each layer's attention."""

    def __init__(self, inner: Any, after: Callable[[int], None]):
        self.inner, self.after = inner, after

    def forward(self, layer: int, q: Tensor, plan: Any) -> Tensor:
        out: Tensor = self.inner.forward(layer, q, plan)
        self.after(layer)
        return out

    def __getattr__(self, name: str) -> Any:  # plan, write, and rope_write where the backend has it
        return getattr(self.inner, name)
