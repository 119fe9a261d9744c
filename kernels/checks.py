"""What a launcher is given, judged before a kernel sees it.

A kernel reads whatever address it computes, without a word. Lesson 04 shows what happens without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.errors import MinillmError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def expect(
    name: str,
    x: Tensor,
    shape: Sequence[int | str | None],
    dtypes: Sequence[torch.dtype] = FLOATS,
    *,
    like: Tensor | None = None,
    last_stride: bool = True,
) -> None:
    """Raise MinillmError unless x has this shape, one of these dtypes, and a last dimension without gaps.

    shape        a number must match; a string or None only names a free dimension in the message
    like         a tensor that must be on the same device
    last_stride  the elements of the last dimension must lie one after the other, since kernels read them as one run
    """
    if not isinstance(x, Tensor):
        raise MinillmError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.device.type not in ("cuda", "cpu"):
        raise MinillmError(f"{name} is on {x.device}; kernels run on cuda, and on cpu in the interpreter")
    wanted = "[" + ", ".join("?" if s is None else str(s) for s in shape) + "]"
    if x.dim() != len(shape) or any(isinstance(s, int) and s != n for s, n in zip(shape, x.shape)):
        raise MinillmError(f"{name} must be {wanted}, got {list(x.shape)}")
    if x.dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise MinillmError(f"{name} must be {names}, got {str(x.dtype).removeprefix('torch.')}")
    if like is not None and x.device != like.device:
        raise MinillmError(f"{name} is on {x.device}, but the other tensors are on {like.device}; move it there")
    if last_stride and x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise MinillmError(
            f"{name} has stride {x.stride(-1)} in its last dimension, and must have 1; call .contiguous() first"
        )


def expect_whole(name: str, value: int, low: int, high: int | None = None) -> None:
    """Raise MinillmError unless value is a whole number from low to high."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise MinillmError(f"{name} must be a whole number {limit}, got {value!r}")


def expect_pages(
    block_tables: Tensor, lens: Tensor, num_blocks: int, block_size: int, name: str = "context_lens"
) -> None:
    """On a CPU, raise MinillmError unless each sequence's tokens lie in blocks that exist.

    The interpreter follows a wrong block id out of the process's memory. On a GPU the host would have to wait to judge.
    """
    if lens.device.type != "cpu" or not len(lens):
        return
    capacity = block_tables.shape[1] * block_size
    if int(lens.min()) < 0 or int(lens.max()) > capacity:
        raise MinillmError(
            f"{name} must be 0 to {capacity}, what a block table holds; got {int(lens.min())} to {int(lens.max())}"
        )
    reached = torch.arange(block_tables.shape[1])[None] * block_size < lens[:, None]
    ids = block_tables[reached]
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_blocks:
        raise MinillmError(
            f"block_tables must name blocks 0 to {num_blocks - 1} where {name} reaches; "
            f"got {int(ids.min())} to {int(ids.max())}"
        )
