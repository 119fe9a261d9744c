"""What to compile ahead of time, and what the result must look like. Lesson 04 reads one; `minillm kernels check` all.

Each kernel module lists its cases as `AHEAD`: the variants that engines launch, in the dtypes that a GPU runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ahead:
    """One variant of a kernel.

    kind       what gates.py asks of it: "elementwise", "reduction" (much in, little out),
               "prefill", "decode", "matvec", "matmul"
    signature  type of each argument that is not a constant, as `compile_ahead` wants it
    loops      whether it has a loop over tiles whose loads must be asynchronous copies when aligned
    wide       names of the integer arguments that must enter address arithmetic in 64 bits; of a pointer, what it
               points to (block ids of a table). Pointers with "table" in their name are followed without being named
    by_target  {target: {constant, "num_warps" or "num_stages": value}}: what differs on one target
    """

    name: str
    kernel: Any
    kind: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    loops: bool = False
    targets: tuple[str, ...] = ("sm_80", "sm_90", "sm_100", "gfx942")
    wide: tuple[str, ...] = field(default=())
    by_target: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def on(self, target: str) -> tuple[dict[str, Any], int, int]:
        """(constants, num_warps, num_stages) of this target."""
        own = dict(self.by_target.get(target, {}))
        warps, stages = own.pop("num_warps", self.num_warps), own.pop("num_stages", self.num_stages)
        return {**self.constants, **own}, warps, stages

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments that are not constants, in the kernel's order."""
        return [name for name in inspect.signature(self.kernel.fn).parameters if name not in self.constants]

    @property
    def followed(self) -> set[str]:
        """Arguments whose products must be 64 bits wide."""
        return set(self.wide) | {n for n, t in self.signature.items() if t.startswith("*i") and "table" in n.lower()}
