"""What to compile ahead of time, and what the result must look like. Lesson 04 reads one; `minillm kernels check` all.

Each kernel module lists its cases as `AHEAD`: the variants that engines launch, in the dtypes that a GPU runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ahead:
    """One variant of a kernel.

    kind       what the gates of DESIGN section 5 ask of it: "elementwise", "prefill", "decode", "matvec", "matmul"
    signature  type of each argument that is not a constant, as `compile_ahead` wants it
    loops      whether it has a loop over tiles whose loads must be asynchronous copies when aligned
    wide       names of the integer arguments that must enter address arithmetic in 64 bits
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
