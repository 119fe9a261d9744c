"""Which device and dtype to run on, and how much memory is left there: judged once, for engine, bench and doctor."""

from __future__ import annotations

import contextlib
import importlib.util
import os

import torch

from minillm.errors import MinillmError
from minillm.models.linear import has_bf16_instructions


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise MinillmError(f"device {name!r} is not known; use 'auto', 'cpu' or 'cuda'") from None
    if device.type not in ("cpu", "cuda"):
        raise MinillmError(f"device {name!r} is not supported; use 'auto', 'cpu' or 'cuda'")
    if device.type == "cpu" and device.index:
        raise MinillmError(f"device {str(name)!r} is not known: there is one 'cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MinillmError(
            f"device {name!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices; use 'cpu'"
        )
    return device


def pick_dtype(asked: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """ "auto" is the checkpoint's dtype, except that a CPU without bf16 instructions computes in fp32."""
    if asked != "auto":
        return getattr(torch, asked)
    if device.type == "cpu" and (checkpoint == "float16" or not has_bf16_instructions()):
        return torch.float32
    return getattr(torch, checkpoint)


def on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make it the current device meanwhile: there CUDA streams and graphs are made, and Triton's kernels launched."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def expect_triton(instead: str) -> None:
    """Raise MinillmError where there is no Triton. instead: what to use there."""
    try:
        found = importlib.util.find_spec("triton")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MinillmError(f"this needs Triton, which is not here: pip install triton (Linux only), or use {instead}")


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: judge by what is installed
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
