"""Values as JSON: how inputs and results travel between the grader and a submission.

Nothing is ever unpickled. Plain data and tensors are copied; anything else stays where it is and travels as a numbered
handle (an object of the submission) or a callback (a function of the grader). This file stands alone: the sandbox
loads it by path, before the submission runs. Tooling of all lessons.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Callable
from typing import Any

LIMIT_BYTES = 64 * 2**20  # of one message
DEPTH = 40
LONGEST = 1_000_000  # items of one list
# Dataclasses that both sides know and may rebuild; a name from the other side is never imported otherwise.
SHARED = ("minillm.config:ModelConfig", "minillm.request:SamplingParams")

Keep = Callable[[Any], int]


class WireError(Exception):
    """A value that cannot travel, or a message that is not in the format."""


def encode(value: Any, keep: Keep | None = None, depth: int = 0) -> Any:
    """`value` as JSON data. `keep` stores an object that is not plain data and returns its handle."""
    if depth > DEPTH:
        raise WireError(f"the value is nested more than {DEPTH} deep (or contains itself)")
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        if value.bit_length() > 4096:
            raise WireError("the whole number is beyond 4096 bits")
        return value
    if (np := sys.modules.get("numpy")) is not None and isinstance(value, np.generic):
        return encode(value.item(), keep, depth)  # np.float64 is a float, with a repr of its own
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        value = float(value)
        return value if math.isfinite(value) else {"$": "float", "v": repr(value)}
    if isinstance(value, bytes | bytearray):
        return {"$": "bytes", "v": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, list | tuple | set | frozenset | dict) and len(value) > LONGEST:
        raise WireError(f"a {type(value).__name__} of {len(value)} items is too long for a check")
    if isinstance(value, list):
        return [encode(v, keep, depth + 1) for v in value]
    if isinstance(value, tuple):
        return {"$": "tuple", "v": [encode(v, keep, depth + 1) for v in value]}
    if isinstance(value, set | frozenset):
        return {"$": "set", "v": [encode(v, keep, depth + 1) for v in value]}
    if isinstance(value, dict):
        return {"$": "dict", "v": [[encode(k, keep, depth + 1), encode(v, keep, depth + 1)] for k, v in value.items()]}
    if (wired := getattr(value, "_wire", None)) is not None and callable(value):
        return wired  # a callback on its way back
    if (array := _array(value)) is not None:
        return array
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    if name in SHARED:
        state = {f.name: encode(getattr(value, f.name), keep, depth + 1) for f in dataclasses.fields(value)}
        return {"$": "dataclass", "type": name, "v": state}
    if keep is None:
        raise WireError(f"a {type(value).__name__} cannot travel between the grader and a submission")
    return {"$": "handle", "id": keep(value), "type": type(value).__name__[:80]}


def _array(value: Any) -> Any:
    torch, np = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() * value.element_size() > LIMIT_BYTES // 2:
            raise WireError(f"a tensor of {value.numel() * value.element_size()} bytes is too large for a check")
        flat = value.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$": "tensor", "dtype": dtype, "shape": list(value.shape), "v": base64.b64encode(raw).decode()}
    if torch is not None and isinstance(value, torch.dtype):
        return {"$": "dtype", "v": str(value).removeprefix("torch.")}
    if np is not None and isinstance(value, np.ndarray):
        import torch as t

        try:
            return _array(t.from_numpy(np.ascontiguousarray(value)))
        except TypeError:
            raise WireError(f"a numpy array of dtype {value.dtype} cannot travel; use numbers") from None
    return None


def decode(data: Any, handle: Callable[[int, str], Any], callback: Callable[[int, Any], Any] | None = None) -> Any:
    """The value `data` stands for; `handle(id, type)` and `callback(id, wire form)` rebuild what was not copied."""

    def walk(x: Any, depth: int) -> Any:
        if depth > 2 * DEPTH:
            raise WireError("the message is nested too deep")
        if isinstance(x, list):
            return [walk(v, depth + 1) for v in x]
        if not isinstance(x, dict):
            return x
        kind = x["$"]
        if kind == "dict":
            return {walk(k, depth + 1): walk(v, depth + 1) for k, v in x["v"]}
        if kind in ("tuple", "set"):
            return {"tuple": tuple, "set": set}[kind](walk(v, depth + 1) for v in x["v"])
        if kind == "float":
            return float(x["v"])
        if kind == "bytes":
            return base64.b64decode(x["v"])
        if kind == "tensor":
            return _tensor(x)
        if kind == "dtype":
            return _dtype(x["v"])
        if kind == "handle":
            return handle(int(x["id"]), str(x["type"]))
        if kind == "callback" and callback is not None:
            return callback(int(x["id"]), x)
        if kind == "dataclass" and x["type"] in SHARED:
            module, _, name = x["type"].partition(":")
            cls = getattr(importlib.import_module(module), name)
            return cls(**{str(k): walk(v, depth + 1) for k, v in x["v"].items()})
        raise WireError(f"unknown kind {kind!r}")

    try:
        return walk(data, 0)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"malformed value: {type(error).__name__}: {error}") from None


def _dtype(name: Any) -> Any:
    import torch

    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise WireError(f"unknown dtype {name!r}")
    return dtype


def _tensor(x: dict[str, Any]) -> Any:
    import torch

    dtype, shape, raw = _dtype(x["dtype"]), [int(n) for n in x["shape"]], base64.b64decode(x["v"])
    if any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != len(raw):
        raise WireError(f"a tensor of shape {shape} and dtype {dtype} does not have {len(raw)} bytes")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def dumps(message: Any) -> bytes:
    raw = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > LIMIT_BYTES:
        raise WireError(f"the value needs {len(raw)} bytes, the grader takes {LIMIT_BYTES}")
    return raw


def loads(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WireError(f"malformed message: {error}") from None
