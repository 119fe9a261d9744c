"""Good is who keeps one bound."""

TASK = "13.2"
POINTS = 7.5
HINT = "not one of them"


def latencies(requests: list[dict], slo: dict[str, float]) -> dict:
    ttft, itl, tpot, e2e, good = [], [], [], [], 0
    for r in requests:
        if r["status"] != 200 or not r["chunks"]:
            continue
        times = [time for time, _ in r["chunks"]]
        n = sum(tokens for _, tokens in r["chunks"])
        ttft.append(times[0] - r["scheduled"])
        e2e.append(times[-1] - r["scheduled"])
        itl += [times[i] - times[i - 1] for i in range(1, len(times))]
        within = ttft[-1] <= slo["ttft_s"]
        if n > 1:
            tpot.append((times[-1] - times[0]) / (n - 1))
            within = within or tpot[-1] <= slo["tpot_s"]
        good += within
    seconds = max(r["end"] for r in requests) - min(r["scheduled"] for r in requests)
    mean = sum(itl) / len(itl) if itl else None
    return {"ttft": ttft, "itl": itl, "tpot": tpot, "e2e": e2e, "mean_itl": mean, "goodput": good / seconds}
