"""Triton kernels, one idea a file: import name `minillm.kernels`.

Every kernel exists three times: a plain torch reference that can run in float64, an eager tiled twin that a debugger
can step through, and the Triton kernel with its launcher. On CPU tensors a launcher runs Triton's interpreter.

    triton_private.py   run on a CPU, count traffic, compile ahead
    checks.py           shapes, dtypes, strides: errors in words
    traffic.py          bytes that a launch loads and stores
    configs.py          tuned configurations, read from configs.json

In your own code, and in exercises: `from minillm.kernels import jit`. It is imported when it is asked for, so that
`import minillm.kernels` needs no Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm.kernels.triton_private import jit

__all__ = ["jit"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from minillm.kernels import triton_private

        return getattr(triton_private, name)
    raise AttributeError(f"module 'minillm.kernels' has no attribute {name!r}")
