"""A record: predictions sealed before the measurement, the samples beside them, where and how. Lesson 00 builds this.

A `Recorder` enforces the order. Predictions are made from shapes and measured ceilings, then sealed under a SHA-256;
after that no prediction is taken, and before that no measurement. `verify` trusts nothing that it can work out again:
hashes, predictions (by today's formula, from the stored shapes and ceilings), statistics, derived numbers, and that no
result is above its roof. A prediction that measurement refutes stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.roofline.cost import Op
from minillm.roofline.device import Device
from minillm.roofline.predict import FORMULA, Prediction, predict_shape
from minillm.roofline.quantities import predict_quantity
from minillm.roofline.stats import derive, fit_of, summary

SCHEMA = 1
KEYS = (
    "schema", "name", "step", "formula", "predicted_at", "measured_at", "command", "software", "device", "setup",
    "ceilings", "ceilings_after", "predictions", "prediction_hash", "results", "derived", "checks", "hash",
)  # fmt: skip


def digest(value: Any) -> str:
    """SHA-256 of plain data, independent of key order and white space."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def content_hash(record: dict[str, Any]) -> str:
    return digest({k: v for k, v in record.items() if k != "hash"})


def prediction_hash(record: dict[str, Any]) -> str:
    """Over everything a prediction rests on: formula, ceilings, shapes and the numbers that came out."""
    return digest({k: record[k] for k in ("formula", "ceilings", "predictions", "predicted_at")})


class Recorder:
    """A record in the making: `predict` ..., `seal`, `measured` ..., `derive` ..., `check` ..., `finish`."""

    def __init__(self, step: str, device: Device, *, command: str, setup: dict[str, Any]):
        """setup: what a reader must know to repeat this (dtype, threads, timer, cache, mode, seed ...)."""
        self.device = device
        self.record: dict[str, Any] = {
            "schema": SCHEMA,
            "name": f"{step}-{device.kind}",
            "step": step,
            "formula": FORMULA,
            "command": command,
            "software": software(),
            "setup": plain(setup),
            "device": {"name": device.name, "kind": device.kind, "id": plain(device.identity)},
            "ceilings": plain(device.to_dict()),
            "predictions": {},
            "results": {},
            "derived": {},
            "checks": [],
        }
        self.sealed = False

    def predict(self, key: str, config: ModelConfig, dtype: str, *, kv_cache: bool = True, **work: Any) -> Prediction:
        """Predict before measuring. work: `rows=[(new, context), ...]`, or `prompts=[...]` and `new_tokens=n`."""
        return self._predict(key, {"model": asdict(config), "dtype": dtype, "kv_cache": kv_cache, **work})

    def predict_kernel(self, key: str, op: Op, dtype: str) -> Prediction:
        """Predict one launch of one kernel."""
        return self._predict(key, {"kernel": asdict(op), "dtype": dtype})

    def _predict(self, key: str, shape: dict[str, Any]) -> Prediction:
        if self.sealed:
            raise MinillmError(f"{key}: the predictions are sealed; a prediction made after measuring is none")
        _name(key)
        shape = plain(shape)
        prediction = predict_shape(shape, self.device)
        self.record["predictions"][key] = {"shape": shape, "prediction": plain(prediction.to_dict())}
        return prediction

    def expect(self, key: str, quantity: str, **shape: Any) -> dict[str, float]:
        """Predict something that is no time: a quantity of quantities.py, its unit with it. Same rules, same seal."""
        if self.sealed:
            raise MinillmError(f"{key}: the predictions are sealed; a prediction made after measuring is none")
        _name(key)
        shape = plain({"quantity": quantity, **shape})
        self.record["predictions"][key] = {"shape": shape, "prediction": plain(predict_quantity(shape))}
        return self.record["predictions"][key]["prediction"]

    def seal(self) -> str:
        """Close the predictions; returns their hash, which is printed before anything is measured."""
        if not self.sealed:
            self.record["predicted_at"] = now()
            self.record["device"]["state_before"] = machine_state(self.device.kind)
            self.record["prediction_hash"] = prediction_hash(self.record)
            self.sealed = True
        return self.record["prediction_hash"]

    def measured(self, key: str, samples: Sequence[float], unit: str = "s", **notes: Any) -> dict[str, float]:
        """Every sample of one quantity. Returns its summary."""
        if not self.sealed:
            raise MinillmError(f"{key}: seal the predictions before measuring")
        _name(key)
        self.record["results"][key] = {"unit": unit, "samples": list(map(float, samples)), **summary(samples), **notes}
        return summary(samples)

    def derive(self, key: str, op: str, of: Sequence[str], **how: Any) -> dict[str, float]:
        """A number worked out of results, see `stats.derive`; `verify` works it out again."""
        _name(key)
        entry = {"op": op, "of": list(of), **how}
        samples = derive(entry, self.record)
        if op == "fit_error":
            entry["factors"] = fit_of(entry, self.record)[0]
        self.record["derived"][key] = {**entry, "samples": samples, **summary(samples)}
        return summary(samples)

    def check(self, name: str, passed: bool, detail: str) -> None:
        """A correctness check of what was measured: speed of wrong output is no result."""
        self.record["checks"].append({"name": name, "passed": bool(passed), "detail": detail})

    def finish(self, ceilings_after: dict[str, float] | None = None) -> dict[str, Any]:
        """Close the record. ceilings_after: bandwidths (bytes/s) measured again at the end, by probe name."""
        if not self.sealed:
            raise MinillmError("a record needs sealed predictions")
        self.record["measured_at"] = now()
        self.record["ceilings_after"] = ceilings_after or {}
        self.record["device"]["state_after"] = machine_state(self.device.kind)
        self.record = plain(self.record)
        self.record["hash"] = content_hash(self.record)
        return self.record


def _name(key: str) -> None:
    if not re.fullmatch(r"[\w.+-]+", key):
        raise MinillmError(f"a key of a record has letters, digits, '.', '_', '+' and '-', got {key!r}")


def save(record: dict[str, Any], folder: str | Path) -> Path:
    """Write `<folder>/<name>.json`, whole or not at all."""
    path = Path(folder) / f"{record['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)
    return path


def plain(value: Any) -> Any:
    """As it comes back from JSON: tuples as lists, whole-number keys as text."""
    return json.loads(json.dumps(value, allow_nan=False))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def software() -> dict[str, str | None]:
    """Versions of what ran, and the commit (with "+dirty" where files differ from it)."""
    found: dict[str, str | None] = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    for package in ("torch", "triton", "transformers", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found | {"commit": commit()}


def commit() -> str | None:
    """The commit of the checkout this package lies in, or None outside of one."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        try:
            out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.SubprocessError):
            return None
        return out.stdout.strip() if out.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    return f"{head}+dirty" if head and git("status", "--porcelain", "--untracked-files=no") else head


def machine_state(kind: str) -> dict[str, Any]:
    """Clocks, driver, temperature of a GPU; clocks and load of a CPU."""
    from minillm.roofline.measure import cpu_state, gpu_state

    return dict(gpu_state()) if kind == "cuda" else cpu_state()


# Verification -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What is wrong with a record, and where in it."""

    key: str
    message: str


def verify(record: Any) -> list[Fault]:
    """Every fault of a record; an empty list means that it can be believed."""
    if not isinstance(record, dict):
        return [Fault("", "is not a JSON object")]
    if missing := [k for k in KEYS if k not in record]:
        return [Fault(missing[0], f"is missing (and {len(missing) - 1} more keys)")]
    if record["schema"] != SCHEMA:
        return [Fault("schema", f"is {record['schema']!r}, this version reads {SCHEMA}")]
    faults = []
    if record["hash"] != content_hash(record):
        faults.append(Fault("hash", "does not match the content: the record was edited"))
    if record["prediction_hash"] != prediction_hash(record):
        faults.append(Fault("prediction_hash", "does not match: predictions or ceilings were edited after the seal"))
    if not record["predicted_at"] <= record["measured_at"]:
        faults.append(Fault("predicted_at", "is later than measured_at"))
    if record["formula"] != FORMULA:
        faults.append(Fault("formula", f"is {record['formula']!r}, today's is {FORMULA!r}: measure again"))
    try:
        return faults + _predictions(record) + _results(record) + _checks(record)
    except (MinillmError, KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        return [*faults, Fault("", f"cannot be read as a record ({type(error).__name__}: {error})")]


def _predictions(record: dict[str, Any]) -> list[Fault]:
    device = Device.from_dict(record["ceilings"])
    faults = []
    for key, entry in record["predictions"].items():
        shape = entry["shape"]
        again = plain(predict_quantity(shape) if "quantity" in shape else predict_shape(shape, device).to_dict())
        if (where := differs(entry["prediction"], again)) is not None:
            faults.append(Fault(f"predictions/{key}/{where}", "is not what today's formula gives for this shape"))
    return faults


def _results(record: dict[str, Any]) -> list[Fault]:
    faults = []
    for group in ("results", "derived"):
        for key, entry in record[group].items():
            samples = entry["samples"]
            if not samples or not all(isinstance(x, int | float) and math.isfinite(x) for x in samples):
                faults.append(Fault(f"{group}/{key}/samples", "must be finite numbers, at least one"))
                continue
            if group == "results" and min(samples) <= 0:
                faults.append(Fault(f"{group}/{key}/samples", "must be above 0"))
            if group == "derived":
                fitted = entry["op"] == "fit_error"  # solved by a library: its rounding differs between machines
                if differs(samples, _again(derive, entry, record), tolerance=1e-6 if fitted else 1e-9) is not None:
                    what = f"is not the {entry['op']} of {', '.join(entry['of'])}"
                    faults.append(Fault(f"derived/{key}/samples", what))
                again = [entry.get("factors"), samples]
                if fitted and differs(again, _again(fit_of, entry, record), tolerance=1e-6) is not None:
                    faults.append(Fault(f"derived/{key}/factors", "are not what these steps give"))
            for name, value in summary(samples).items():
                if differs(entry.get(name), value) is not None:
                    faults.append(Fault(f"{group}/{key}/{name}", f"is {entry.get(name)!r}, the samples give {value!r}"))
    for key in record["predictions"]:
        result = record["results"].get(key) or record["derived"].get(key)
        if result is None:
            faults.append(Fault(f"results/{key}", "is missing: this was predicted and never measured"))
        elif "quantity" in record["predictions"][key]["shape"]:
            if result["p10"] < (floor := record["predictions"][key]["prediction"]["lower"]):
                faults.append(Fault(f"results/{key}/p10", f"is {result['p10']:.6g}, and cannot be below {floor:.6g}"))
        elif result["p10"] < (floor := roof_seconds(record, key)):
            message = f"is above its roof: {result['p10']:.4g} s, and nothing can be faster than {floor:.4g} s"
            faults.append(Fault(f"results/{key}/p10", message))
    return faults


def _again(work: Callable[..., Any], entry: dict[str, Any], record: dict[str, Any]) -> Any:
    """What a derived number comes from, worked out once more, or None where that is impossible."""
    try:
        return plain(work(entry, record))
    except (MinillmError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def roof_seconds(record: dict[str, Any], key: str) -> float:
    """The least time for a predicted piece of work, by the better of the ceilings before and after."""
    prediction = record["predictions"][key]["prediction"]
    before = Device.from_dict(record["ceilings"])
    faster = max([before.roof_bandwidth, *record["ceilings_after"].values()]) / before.roof_bandwidth
    return prediction["lower"] / faster


def _checks(record: dict[str, Any]) -> list[Fault]:
    if not record["checks"]:
        return [Fault("checks", "is empty: nothing shows that what ran was right")]
    return [Fault(f"checks/{c['name']}", f"failed: {c['detail']}") for c in record["checks"] if c["passed"] is not True]


def differs(a: Any, b: Any, path: str = "", tolerance: float = 1e-9) -> str | None:
    """The first place where two pieces of plain data differ (numbers: by more than rounding), or None."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        pairs = [(a[k], b[k], k) for k in a]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(x, y, str(i)) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, int | float) and isinstance(b, int | float) and type(a) is not bool and type(b) is not bool:
        return None if math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-15) else path
    else:
        return None if a == b and type(a) is type(b) else path
    found = (differs(x, y, f"{path}/{k}" if path else k, tolerance) for x, y, k in pairs)
    return next((where for where in found if where is not None), None)
