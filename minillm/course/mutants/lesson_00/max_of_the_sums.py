"""One roofline for the whole step: bytes hide under another operator's FLOPs."""

TASK = "00.5"
POINTS = 2.5
HINT = "not the maximum of sums"


def step_time(ops, peak_flops, bandwidth, overhead):
    compute, memory = sum(f for f, _ in ops) / peak_flops, sum(b for _, b in ops) / bandwidth
    calls = len(ops) * overhead
    return max(compute, memory) + calls, compute + memory + calls
