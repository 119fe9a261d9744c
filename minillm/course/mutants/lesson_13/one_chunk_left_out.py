"""An answer of several tokens that came in one chunk has no TPOT."""

TASK = "13.2"
POINTS = 7.5
HINT = "they came at once, so it is 0"


def latencies(requests, slo):
    ok = [r for r in requests if r["status"] == 200 and r["chunks"]]
    ttft = [r["chunks"][0][0] - r["scheduled"] for r in ok]
    itl = [b[0] - a[0] for r in ok for a, b in zip(r["chunks"], r["chunks"][1:])]
    e2e = [r["chunks"][-1][0] - r["scheduled"] for r in ok]
    tpot, good = [], 0
    for r, first in zip(ok, ttft):
        n = sum(k for _, k in r["chunks"])
        each = (r["chunks"][-1][0] - r["chunks"][0][0]) / (n - 1) if len(r["chunks"]) >= 2 else None
        if each is not None:
            tpot.append(each)
        good += first <= slo["ttft_s"] and (each is None or each <= slo["tpot_s"])
    span = max((r["end"] for r in requests), default=0) - min((r["scheduled"] for r in requests), default=0)
    return {
        "ttft": ttft,
        "itl": itl,
        "tpot": tpot,
        "e2e": e2e,
        "mean_itl": sum(itl) / len(itl) if itl else None,
        "goodput": good / span if span else 0.0,
    }
