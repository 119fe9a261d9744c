"""Statistics of samples, and the numbers that are worked out of them. Kept apart so that records can be checked."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from minillm.errors import MinillmError


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, tenth and ninetieth percentile (nearest rank), least and most."""
    xs = sorted(map(float, samples))
    at = lambda q: xs[round(q * (len(xs) - 1))]
    return {"median": statistics.median(xs), "p10": at(0.1), "p90": at(0.9), "min": xs[0], "max": xs[-1]}


def derive(entry: dict[str, Any], record: dict[str, Any]) -> list[float]:
    """Samples of a derived number. `of` names results of the record, in seconds.

    rate      count / seconds                      tokens/s
    ratio     samples of the first / the second    paired by repeat: both ran side by side
    difference  samples of the first - the second  paired likewise
    scaled    factor * seconds                     time of one of many equal parts
    with_collectives  seconds + count * an all-reduce by the model    a shard's layer, with what ranks say to each other
    tp_speedup  the first / (the second + count * an all-reduce)  paired: whole layer over a shard of it
    share     least possible seconds / seconds     part of the roof that was reached
    of_bandwidth  weights and KV bytes / seconds / bytes/s of the second result, measured side by side with it
    residual  seconds / expected seconds           1 is a perfect prediction
    prediction_error |median seconds / expected seconds - 1|  one sample for each of `of`
    fit_error |fitted - measured| / measured       steps `of`, by factors fitted on the steps `train` alone;
              where the steps are kernels, a factor and an overhead for each kernel
    """
    op, keys = entry["op"], entry["of"]
    xs = [record["results"][key]["samples"] for key in keys]
    if op == "rate":
        return [entry["count"] / x for x in xs[0]]
    if op == "ratio":
        return [a / b for a, b in zip(*xs, strict=True)]
    if op == "difference":
        return [a - b for a, b in zip(*xs, strict=True)]
    if op in ("with_collectives", "tp_speedup"):
        from minillm.roofline.comm import Link

        said = entry["count"] * Link(**entry["link"]).all_reduce(entry["nbytes"], entry["ranks"])
        if op == "tp_speedup":
            return [a / (b + said) for a, b in zip(*xs, strict=True)]
        return [x + said for x in xs[0]]
    if op == "scaled":
        return [entry["factor"] * x for x in xs[0]]
    if op == "fit_error":
        return fit_of(entry, record)[1]
    if op == "prediction_error":
        expected = [record["predictions"][key]["prediction"]["expected"] for key in keys]
        return [abs(statistics.median(x) / e - 1) for x, e in zip(xs, expected, strict=True)]
    prediction = record["predictions"][entry.get("prediction", keys[0])]["prediction"]
    if op == "share":
        return [prediction["lower"] / x for x in xs[0]]
    if op == "of_bandwidth":
        return [prediction["compulsory_bytes"] / x / rate for x, rate in zip(*xs, strict=True)]
    if op == "residual":
        return [x / prediction["expected"] for x in xs[0]]
    raise MinillmError(f"{op!r} is not a way to derive a number")


def fit_of(entry: dict[str, Any], record: dict[str, Any]) -> tuple[dict[str, float], list[float]]:
    """Factors fitted on the steps `train`, and their relative errors on the steps `of`. See fit.py."""
    from minillm.roofline.device import Device
    from minillm.roofline.fit import fit
    from minillm.roofline.predict import ops_of

    if set(entry["train"]) & set(entry["of"]):
        raise MinillmError("a fit is judged only on steps that it never saw")
    device = Device.from_dict(record["ceilings"])
    shapes = {key: record["predictions"][key]["shape"] for key in (*entry["train"], *entry["of"])}
    steps = {key: (ops_of(shape), record["results"][key]["median"]) for key, shape in shapes.items()}
    dtype = next(iter(shapes.values()))["dtype"]
    if all("kernel" in shape for shape in shapes.values()):
        return _fit_kernels(entry, steps, device, dtype)
    fitted = fit([steps[key] for key in entry["train"]], device, dtype)
    return fitted.factors, fitted.errors([steps[key] for key in entry["of"]], device, dtype)


def _fit_kernels(
    entry: dict[str, Any], steps: dict[str, Any], device: Any, dtype: str
) -> tuple[dict[str, float], list[float]]:
    """For each kernel `factor` and `overhead_s`, fitted on its launches in `train`; errors on those in `of`."""
    from minillm.roofline.fit import fit_kernel

    launches = {key: (ops[0], seconds) for key, (ops, seconds) in steps.items()}
    fits = {}
    for name in dict.fromkeys(op.name for op, _ in launches.values()):
        fits[name] = fit_kernel([launches[k] for k in entry["train"] if launches[k][0].name == name], device, dtype)
    factors = {f"{name}.factor": f.factor for name, f in fits.items()}
    factors |= {f"{name}.overhead_s": f.overhead for name, f in fits.items()}
    judged = [launches[key] for key in entry["of"]]
    return factors, [abs(fits[op.name].seconds(op, device, dtype) - s) / s for op, s in judged]
