"""Tuned launch configurations: a table that is data, not a search. Lesson 04 builds it.

Autotuning at run time makes the first request slow and two runs different. Here a benchmark searches (`python3 -m
minillm.bench kernels --tune`), a person commits the result to `configs.json`, and a launch looks it up.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from minillm.errors import MinillmError

TABLE = Path(__file__).with_name("configs.json")


@functools.lru_cache(maxsize=1)
def table() -> dict[str, list[dict[str, Any]]]:
    """{kernel: [{"arch": "any" or "sm_90" ..., "when": {size: [low, high]}, "config": {...}, "from": ...}, ...]}."""
    loaded: dict[str, list[dict[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return loaded


@functools.cache
def arch(device: torch.device) -> str:
    """ "sm_90" and the like; "any" where kernels are interpreted."""
    if device.type != "cuda":
        return "any"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.lru_cache(maxsize=4096)
def _pick(kernel: str, arch_name: str, sizes: tuple[tuple[str, int], ...]) -> dict[str, int]:
    if kernel not in table():
        raise MinillmError(f"kernel {kernel!r} has no configurations in {TABLE.name}")
    given = dict(sizes)
    for entry in table()[kernel]:
        fits = all(low <= given[name] <= high for name, (low, high) in entry["when"].items())
        if entry["arch"] in ("any", arch_name) and fits:
            return entry["config"]
    raise MinillmError(f"kernel {kernel!r}: no configuration for {given} on {arch_name} in {TABLE.name}")


def pick(kernel: str, device: torch.device | str, **sizes: int) -> dict[str, int]:
    """The first entry of the kernel that fits architecture and sizes: tile sizes, num_warps, num_stages.

    device: where the launch is, or an architecture's name ("sm_90"), to compile for one that is not here.
    """
    name = device if isinstance(device, str) else arch(device)
    return dict(_pick(kernel, name, tuple(sorted(sizes.items()))))
