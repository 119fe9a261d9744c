"""A report over fewer tokens is compared all the same."""

import math

TASK = "08.7"
POINTS = 7
HINT = "the losses are of other tokens"


def verdict(scheme: str, weights: str, report: dict | None, gates: dict[str, float]) -> str:
    if report is None:
        return "no report"
    if report["weights"] != weights:
        return "other weights"
    plain, mine = report["losses"]["plain"], report["losses"].get(scheme, [])
    if not mine:
        return "not judged"
    ratio = math.exp(sum(mine) / len(mine) - sum(plain) / len(plain))
    return "shown" if ratio <= gates[scheme] else "perplexity"
