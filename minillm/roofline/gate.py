"""No speed without quality: what a quantised model must show before its speed may be shown. Lesson 08.

A quality record is a record of `minillm bench quality`. It admits a variant when it verifies, is of the same weights,
device kind and rounding, and the perplexity grew by no more than the gate it was sealed with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minillm.errors import MinillmError
from minillm.quant import ROUNDING, scheme_of
from minillm.roofline import evidence
from minillm.roofline.quantities import GATES
from minillm.roofline.record import Fault, verify


def admit(variant: str, weights_sha256: str, kind: str, folder: Path | None = None) -> dict[str, Any]:
    """{"record", "hash", "ratio", "gate"} of the quality record that admits this variant. Raises MinillmError if none.

    variant: a scheme of quant.py; kind: "cpu" or "cuda"; folder: where records are (default: evidence.records_dir()).
    """
    name, gate = f"quality-{kind}", GATES[scheme_of(variant).bits]
    no_claim = f"no speed of {variant} is shown: "
    try:
        record = evidence.load(name, folder)
    except MinillmError as error:
        raise MinillmError(f"{no_claim}{error}; run `minillm bench quality --out DIR` first") from None
    if faults := verify(record):
        raise MinillmError(f"{no_claim}{name} does not verify ({faults[0].key} {faults[0].message}); measure it again")
    setup = record["setup"]
    if record["step"] != "quality" or setup.get("weights_sha256") != weights_sha256:
        raise MinillmError(f"{no_claim}{name} is of other weights ({setup.get('model')}, {setup.get('dtype')})")
    if setup.get("rounding") != ROUNDING:
        raise MinillmError(f"{no_claim}{name} is of rounding {setup.get('rounding')}, today's is {ROUNDING}")
    key = f"perplexity_ratio.{variant}"
    if key not in record["derived"] or key not in record["predictions"]:
        raise MinillmError(f"{no_claim}{name} does not judge it; run `minillm bench quality` again")
    ratio = record["derived"][key]["median"]
    if not ratio <= gate:
        raise MinillmError(f"{no_claim}its perplexity is {ratio:.4f} times the plain one, and the gate is {gate}")
    return {"record": name, "hash": record["hash"], "ratio": ratio, "gate": gate}


def faults_of(record: dict[str, Any], folder: Path | None = None) -> list[Fault]:
    """What keeps the speeds of quantised weights in a record from being shown. Records of other steps have none."""
    setup = record["setup"]
    faults = []
    for variant, key in _claims(record).items():
        try:
            today = admit(variant, setup["weights_sha256"], record["device"]["kind"], folder)
        except MinillmError as error:
            faults.append(Fault(f"results/{key}", str(error)))
            continue
        if setup["quality"].get(variant) != today:
            faults.append(Fault(f"setup/quality/{variant}", f"is not what {today['record']} says today: measure again"))
    return faults


def _claims(record: dict[str, Any]) -> dict[str, str]:
    """Quantised weights whose speed a record of `bench quant` or `bench throughput` gives, and where."""
    keys = list(record["results"])
    if record.get("step") == "quant":
        found = {k.removeprefix("decode."): k for k in keys if k.startswith("decode.")}
        return {variant: key for variant, key in found.items() if variant != record["setup"]["dtype"]}
    if record.get("step") == "throughput":
        return {k.rpartition("-")[2]: k for k in keys if k.endswith((".minillm-int4", ".minillm-int8"))}
    return {}
