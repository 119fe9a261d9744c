"""The mean of exp, not exp of the mean."""

import math

TASK = "08.7"
POINTS = 2
HINT = "not the mean of exp"


def verdict(scheme: str, weights: str, report: dict | None, gates: dict[str, float]) -> str:
    if report is None:
        return "no report"
    if report["weights"] != weights:
        return "other weights"
    plain, mine = report["losses"]["plain"], report["losses"].get(scheme, [])
    if not mine or len(mine) != len(plain):
        return "not judged"
    ratio = sum(map(math.exp, mine)) / sum(map(math.exp, plain))
    return "shown" if ratio <= gates[scheme] else "perplexity"
