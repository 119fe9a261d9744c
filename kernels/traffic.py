"""Bytes that a kernel loads and stores, counted, not estimated. Lesson 04 compares them with the analytic ones.

Triton's interpreter sees each load and store with its addresses and mask. What is counted is what the program asked
for: a GPU's caches may answer a repeated load without going to memory, so `unique` bytes are counted as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from minillm.kernels.triton_private import watch_memory


@dataclass
class Traffic:
    """loaded and stored: bytes asked for. loads and stores: how many instructions' worth of calls did so."""

    loaded: int = 0
    stored: int = 0
    loads: int = 0
    stores: int = 0
    _read: list[Any] = field(default_factory=list, repr=False)
    _written: list[Any] = field(default_factory=list, repr=False)

    @property
    def bytes(self) -> int:
        return self.loaded + self.stored

    @property
    def unique_loaded(self) -> int:
        """Bytes of different addresses read: what a perfect cache would fetch."""
        return _different(self._read)

    @property
    def unique_stored(self) -> int:
        return _different(self._written)


def _different(parts: list[Any]) -> int:
    if not parts:
        return 0
    by_size: dict[int, list[Any]] = {}
    for addresses, itemsize in parts:
        by_size.setdefault(itemsize, []).append(addresses)
    return sum(len(np.unique(np.concatenate(found))) * size for size, found in by_size.items())


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count what interpreted kernels load and store meanwhile.

    >>> with counted() as traffic:
    ...     rms_norm(x, weight, 1e-5)
    >>> traffic.loaded, traffic.stored
    """
    traffic = Traffic()

    def touched(addresses: Any, mask: Any, itemsize: int) -> tuple[int, Any]:
        chosen = np.broadcast_to(addresses, mask.shape)[mask.astype(bool)]
        return chosen.size * itemsize, chosen

    def loaded(addresses: Any, mask: Any, itemsize: int) -> None:
        size, chosen = touched(addresses, mask, itemsize)
        traffic.loaded, traffic.loads = traffic.loaded + size, traffic.loads + 1
        traffic._read.append((chosen, itemsize))

    def stored(addresses: Any, mask: Any, itemsize: int) -> None:
        size, chosen = touched(addresses, mask, itemsize)
        traffic.stored, traffic.stores = traffic.stored + size, traffic.stores + 1
        traffic._written.append((chosen, itemsize))

    with watch_memory(loaded, stored):
        yield traffic
