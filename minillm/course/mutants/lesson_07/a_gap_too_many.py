"""A gap for every kernel."""

import math

TASK = "07.6"
POINTS = 0
HINT = "n - 1 gaps"


def graph_gain(launches, host, device, graph, gap, capture):
    saved = max(launches * host, device) - (graph + device + launches * gap)
    return saved, math.ceil(capture / saved) if saved > 0 else None
