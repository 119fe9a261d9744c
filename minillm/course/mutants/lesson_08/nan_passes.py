"""NaN is not larger than the gate, so it passes."""

import math

TASK = "08.7"
POINTS = 6
HINT = "NaN passes"


def verdict(scheme: str, weights: str, report: dict | None, gates: dict[str, float]) -> str:
    if report is None:
        return "no report"
    if report["weights"] != weights:
        return "other weights"
    plain, mine = report["losses"]["plain"], report["losses"].get(scheme, [])
    if not mine or len(mine) != len(plain):
        return "not judged"
    ratio = math.exp(sum(mine) / len(mine) - sum(plain) / len(plain))
    return "perplexity" if ratio > gates[scheme] else "shown"
