"""The report's fingerprint is not looked at."""

import math

TASK = "08.7"
POINTS = 7
HINT = "the report is of other weights"


def verdict(scheme: str, weights: str, report: dict | None, gates: dict[str, float]) -> str:
    if report is None:
        return "no report"
    plain, mine = report["losses"]["plain"], report["losses"].get(scheme, [])
    if not mine or len(mine) != len(plain):
        return "not judged"
    ratio = math.exp(sum(mine) / len(mine) - sum(plain) / len(plain))
    return "shown" if ratio <= gates[scheme] else "perplexity"
