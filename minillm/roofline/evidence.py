"""Numbers by key, from the committed records: no measured number is ever typed. Lesson 00 introduces it.

    value("single-cpu/ratio/median")          one number
    render("{{single-cpu/ratio/median:.2f}} times")   numbers in text
    table("ladder-cpu", ["prefill_128", "decode_128"])  predicted beside measured, as Markdown
    gpu("ladder", "decode_128", ...)          what a GPU says, or the prediction alone where no GPU has run

A path is RECORD/KEY/FIELD. KEY is a result (its samples' median, p10, p90, min, max, and what was predicted under
`prediction/...`), a derived number, or any other part of the record.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError
from minillm.roofline.device import Device
from minillm.roofline.predict import Prediction
from minillm.roofline.record import verify

_NUMBER = r"([\w.+-]+/[^}\s*:]+)\s*(?:\*\s*([0-9.eE+-]+)\s*)?(?::([^}]*))?"
_INLINE = re.compile(r"\{\{\s*" + _NUMBER + r"\}\}")
_MARKED = re.compile(r"(<!--\s*\{\{\s*" + _NUMBER + r"\}\}\s*-->)(.*?)(<!--\s*/\s*-->)", re.DOTALL)


def records_dir() -> Path:
    """`$MINILLM_RECORDS`, else `benchmarks/records` of the checkout, else of the current folder."""
    if own := os.environ.get("MINILLM_RECORDS"):
        return Path(own)
    checkout = Path(__file__).resolve().parents[2] / "benchmarks" / "records"
    return checkout if checkout.is_dir() else Path("benchmarks") / "records"


def names(folder: Path | None = None) -> list[str]:
    """Records that are there, by name."""
    return sorted(p.stem for p in (folder or records_dir()).glob("*.json"))


def load(name: str, folder: Path | None = None) -> dict[str, Any]:
    """One record, as written; `check` says whether it can be believed."""
    path = (folder or records_dir()) / f"{name}.json"
    try:
        modified = path.stat().st_mtime_ns
    except OSError:
        have = ", ".join(names(folder)) or "none"
        raise MinillmError(f"no record {name!r} (there are: {have}); `minillm bench` makes them") from None
    return _read(path, modified)


@functools.lru_cache(maxsize=64)
def _read(path: Path, modified: int) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise MinillmError(f"record {path.name} cannot be read ({error}); restore it or measure again") from None
    if not isinstance(record, dict):
        raise MinillmError(f"record {path.name} is not a JSON object; restore it or measure again")
    return record


def _entries(record: dict[str, Any]) -> dict[str, Any]:
    """Every key of a record that a path may name."""
    found: dict[str, Any] = dict(record)
    for key, entry in record.get("predictions", {}).items():
        found[key] = dict(entry)
    for group in ("results", "derived"):
        for key, entry in record.get(group, {}).items():
            found[key] = found.get(key, {}) | entry
    return found


def value(path: str, folder: Path | None = None) -> Any:
    """What stands at RECORD/KEY/FIELD. Raises MinillmError naming the nearest key when there is no such thing."""
    name, *parts = path.split("/")
    here: Any = _entries(load(name, folder))
    for i, part in enumerate(parts):
        if isinstance(here, list) and part.isdigit() and int(part) < len(here):
            here = here[int(part)]
        elif isinstance(here, dict) and part in here:
            here = here[part]
        else:
            near = difflib.get_close_matches(part, [str(k) for k in here] if isinstance(here, dict) else [], 3, 0.4)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise MinillmError(f"record {name} has no {'/'.join(parts[: i + 1])!r}{hint}")
    return here


def _format(match: re.Match[str], folder: Path | None) -> str:
    path, factor, spec = match.group(1), match.group(2), (match.group(3) or "").strip()
    return _show(path, factor, spec, folder)


def _show(path: str, factor: str | None, spec: str, folder: Path | None) -> str:
    found = value(path, folder)
    try:
        return format(found * float(factor) if factor else found, spec)
    except (TypeError, ValueError) as error:
        raise MinillmError(f"{path} cannot be shown as {spec!r} ({error})") from None


def render(text: str, folder: Path | None = None) -> str:
    """Fill in `{{RECORD/KEY/FIELD:format}}`; `*1e3` after the path scales, as in `{{r/step/median*1e3:.1f}} ms`."""
    return _INLINE.sub(lambda m: _format(m, folder), text)


def sync(text: str, folder: Path | None = None) -> str:
    """Renew the numbers of a text that shows them beside their source: `<!-- {{path:format}} -->number<!-- / -->`.

    For README: Markdown hides the comments. A text whose `sync` differs from it holds a number no record gives.
    """
    return _MARKED.sub(lambda m: m[1] + _show(m[2], m[3], (m[4] or "").strip(), folder) + m[6], text)


def seconds(value_s: float) -> str:
    """Seconds in the unit that reads best: `70.0 ms`, `3.2 us`, `1.50 s`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value_s >= scale:
            return f"{value_s / scale:.2f} {unit}" if value_s < 10 * scale else f"{value_s / scale:.1f} {unit}"
    return f"{value_s / 1e-9:.0f} ns"


def table(name: str, keys: Sequence[str], labels: Sequence[str] | None = None, folder: Path | None = None) -> str:
    """Predicted beside measured, as a Markdown table: one line a key."""
    return table_of(load(name, folder), keys, labels)


def table_of(record: dict[str, Any], keys: Sequence[str], labels: Sequence[str] | None = None) -> str:
    """The same from a record in hand."""
    entries = _entries(record)
    lines = ["| work | predicted (bounds) | measured (p10 to p90) | of the roof | bound |", "|---|---|---|---|---|"]
    for key, label in zip(keys, labels or keys, strict=True):
        if key not in entries or "median" not in entries[key] or "prediction" not in entries[key]:
            raise MinillmError(f"record {record.get('name')} has no predicted and measured {key!r}")
        e, p = entries[key], entries[key]["prediction"]
        lines.append(
            f"| {label} | {seconds(p['expected'])} ({seconds(p['lower'])} to {seconds(p['upper'])}) "
            f"| {seconds(e['median'])} ({seconds(e['p10'])} to {seconds(e['p90'])}) "
            f"| {p['lower'] / e['median']:.0%} | {p['bound']} |"
        )
    return "\n".join(lines)


def gpu_records(step: str, folder: Path | None = None) -> list[str]:
    """Records of this bench step that a GPU made."""
    return [n for n in names(folder) if (r := load(n, folder)).get("step") == step and r["device"]["kind"] == "cuda"]


def gpu(step: str, key: str, prediction: Prediction, device: Device, folder: Path | None = None) -> str:
    """One sentence for a lesson: what a GPU measured, or that none has, with the prediction for `device`."""
    for name in gpu_records(step, folder):
        entry = _entries(load(name, folder)).get(key, {})
        if "median" in entry:
            expected = seconds(entry["prediction"]["expected"]) if "prediction" in entry else "no prediction"
            return (
                f"Measured on {load(name, folder)['device']['name']}: {seconds(entry['median'])} "
                f"(p10 {seconds(entry['p10'])}, p90 {seconds(entry['p90'])}); predicted {expected}. Record {name}."
            )
    return (
        f"No GPU record yet. Predicted for {device.name} from its {device.source}: {seconds(prediction.expected)} "
        f"(at least {seconds(prediction.lower)}), bound by {prediction.bound}."
    )


def check(folder: Path | None = None) -> list[dict[str, str]]:
    """Verify every record. Each fault names the file, the key and what is wrong; an empty list is good."""
    faults = []
    for name in names(folder):
        try:
            record = load(name, folder)
        except MinillmError as error:
            faults.append({"file": f"{name}.json", "key": "", "message": str(error)})
            continue
        found = verify(record)
        if not found and record["step"] in (
            "quant",
            "throughput",
        ):  # a speed of quantised weights stands on a quality record
            from minillm.roofline.gate import faults_of

            found = faults_of(record, folder)
        faults += [{"file": f"{name}.json", "key": f.key, "message": f.message} for f in found]
        if record.get("name") != name:
            faults.append({"file": f"{name}.json", "key": "name", "message": f"is {record.get('name')!r}"})
    return faults
