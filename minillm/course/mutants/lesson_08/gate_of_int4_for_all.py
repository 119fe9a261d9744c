"""One gate for all schemes."""

import math

TASK = "08.7"
POINTS = 6
HINT = "each scheme has its own gate"


def verdict(scheme: str, weights: str, report: dict | None, gates: dict[str, float]) -> str:
    if report is None:
        return "no report"
    if report["weights"] != weights:
        return "other weights"
    plain, mine = report["losses"]["plain"], report["losses"].get(scheme, [])
    if not mine or len(mine) != len(plain):
        return "not judged"
    ratio = math.exp(sum(mine) / len(mine) - sum(plain) / len(plain))
    return "shown" if ratio <= gates["int4"] else "perplexity"
