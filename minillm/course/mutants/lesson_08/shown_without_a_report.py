"""Without a report everything is shown."""

import math

TASK = "08.7"
POINTS = 7
HINT = "no report, no speed"


def verdict(scheme: str, weights: str, report: dict | None, gates: dict[str, float]) -> str:
    if report is None:
        return "shown"
    if report["weights"] != weights:
        return "other weights"
    plain, mine = report["losses"]["plain"], report["losses"].get(scheme, [])
    if not mine or len(mine) != len(plain):
        return "not judged"
    ratio = math.exp(sum(mine) / len(mine) - sum(plain) / len(plain))
    return "shown" if ratio <= gates[scheme] else "perplexity"
