"""Losses are divided, not perplexities."""

TASK = "08.7"
POINTS = 5
HINT = "their ratio is exp(mean - mean)"


def verdict(scheme: str, weights: str, report: dict | None, gates: dict[str, float]) -> str:
    if report is None:
        return "no report"
    if report["weights"] != weights:
        return "other weights"
    plain, mine = report["losses"]["plain"], report["losses"].get(scheme, [])
    if not mine or len(mine) != len(plain):
        return "not judged"
    ratio = (sum(mine) / len(mine)) / (sum(plain) / len(plain))
    return "shown" if ratio <= gates[scheme] else "perplexity"
