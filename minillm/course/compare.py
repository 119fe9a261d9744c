"""Says how a result differs from the expected one, in words a learner can act on. Tooling of all lessons."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def brief(value: Any, limit: int = 110) -> str:
    """One line for any value: tensors by dtype and shape (with the numbers when they are few)."""
    if is_tensor(value):
        text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return f"{text} = {_numbers(value)}" if 0 < value.numel() <= 6 else text
    if isinstance(value, float):
        return f"{value:.6g}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value))
        changed = ", ".join(f"{name}={v!r}" for name, v, default in fields if v != default)
        return f"{type(value).__name__}({changed})"
    if isinstance(value, tuple | list):
        inner = ", ".join(brief(v, 30) for v in value[:8]) + (", ..." if len(value) > 8 else "")
        text = f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{k!r}: {brief(v, 30)}" for k, v in list(value.items())[:6]) + "}"
    elif callable(value) and hasattr(value, "__name__"):
        text = f"function {value.__name__}"
    else:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _numbers(tensor: Any) -> str:
    return str([float(f"{v:.4g}") if isinstance(v, float) else v for v in tensor.reshape(-1).tolist()])


def kind(value: Any) -> str:
    if value is None:
        return "None"
    if is_tensor(value):
        return f"a tensor {brief(value)}"
    return f"{'an' if type(value).__name__[:1] in 'aeiou' else 'a'} {type(value).__name__}"


def difference(got: Any, want: Any, rel: float, abs_: float, path: str = "") -> str | None:
    """None when `got` equals `want` within `abs_ + rel * |want|`, else what is wrong and where.

    Lists and tuples count as the same; a whole-number float counts as an int; dtype and shape must agree.
    """
    at = f"{path}: " if path else ""
    if got is None and want is not None:
        return f"{at}got None; does the function return its result on every path?"
    if is_tensor(want):
        return _tensor_difference(got, want, rel, abs_, at)
    if isinstance(want, bool) or want is None or isinstance(want, str | bytes):
        if type(got) is not type(want):
            return f"{at}expected {brief(want)}, got {kind(got)}"
        return None if got == want else f"{at}expected {brief(want)}, got {brief(got)}"
    if isinstance(want, int | float):
        return _number_difference(got, want, rel, abs_, at)
    if isinstance(want, list | tuple):
        if not isinstance(got, list | tuple):
            return f"{at}expected {kind(want)} of length {len(want)}, got {kind(got)}"
        if len(got) != len(want):
            return f"{at}expected length {len(want)}: {brief(want)}, got length {len(got)}: {brief(got)}"
        pairs = ((f"{path}[{i}]", g, w) for i, (g, w) in enumerate(zip(got, want, strict=True)))
        return next((d for p, g, w in pairs if (d := difference(g, w, rel, abs_, p))), None)
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return f"{at}expected a dict with keys {list(want)}, got {kind(got)}"
        if set(map(str, got)) != set(map(str, want)):
            return f"{at}expected the keys {list(want)}, got {brief(list(got))}"
        pairs = ((f"{path}[{k!r}]", got.get(k), w) for k, w in want.items())
        return next((d for p, g, w in pairs if (d := difference(g, w, rel, abs_, p))), None)
    if isinstance(want, set | frozenset):
        return None if got == want else f"{at}expected {brief(want)}, got {brief(got)}"
    return None if type(got) is type(want) and got == want else f"{at}expected {brief(want)}, got {brief(got)}"


def _number_difference(got: Any, want: float, rel: float, abs_: float, at: str) -> str | None:
    if is_tensor(got):
        return f"{at}expected a plain number, got {kind(got)}; `.item()` takes the number out of a tensor"
    if isinstance(got, bool) or not isinstance(got, int | float):
        return f"{at}expected a number ({brief(want)}), got {kind(got)}"
    if math.isnan(got) and not math.isnan(want):
        return f"{at}expected {brief(want)}, got NaN"
    if got == want or (math.isnan(got) and math.isnan(want)):
        return None
    if math.isfinite(got) and math.isfinite(want) and abs(got - want) <= abs_ + rel * abs(want):
        return None
    ratio = f" ({got / want:.4g} times as much)" if want and math.isfinite(got) and math.isfinite(want) else ""
    for digits in (6, 12, 17):
        a, b = _exact(want, digits), _exact(got, digits)
        if a != b:
            break
    return f"{at}expected {a}, got {b}{ratio}"


def _exact(value: float, digits: int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def _tensor_difference(got: Any, want: Any, rel: float, abs_: float, at: str) -> str | None:
    import torch

    if not is_tensor(got):
        return f"{at}expected {kind(want)}, got {kind(got)}"
    if got.shape != want.shape:
        return f"{at}expected shape {list(want.shape)}, got {list(got.shape)}"
    if got.dtype != want.dtype:
        name = str(want.dtype).removeprefix("torch.")
        return f"{at}expected dtype {name}, got {str(got.dtype).removeprefix('torch.')}; the numbers were not compared"
    if not want.numel():
        return None
    a, b = got.double(), want.double()
    bad = torch.isnan(a) & ~torch.isnan(b)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        return f"{at}{int(bad.sum())} of {bad.numel()} numbers are NaN, the first at {list(where)}"
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    error = torch.where(same, 0.0, (a - b).abs())
    wrong = ~same & ~(b.isfinite() & (error <= abs_ + rel * b.abs()))  # beside infinity every number is near
    if not wrong.any():
        return None
    flat = int(torch.where(wrong, error.nan_to_num(float("inf")), -1.0).argmax())
    spot = [int(i) for i in torch.unravel_index(torch.tensor(flat), want.shape)]
    g, w = a.reshape(-1)[flat].item(), b.reshape(-1)[flat].item()
    return f"{at}{int(wrong.sum())} of {wrong.numel()} numbers differ, most at {spot}: expected {w:.5g}, got {g:.5g}"
