"""The overhead added once, and to an empty step too."""

TASK = "00.5"
POINTS = 2
HINT = "every operator pays the overhead"


def step_time(ops, peak_flops, bandwidth, overhead):
    lower = sum(max(f / peak_flops, b / bandwidth) for f, b in ops)
    upper = sum(f / peak_flops + b / bandwidth for f, b in ops)
    return lower + overhead, upper + overhead
