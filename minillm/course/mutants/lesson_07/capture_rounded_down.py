"""The last step that has not yet paid."""

import math

TASK = "07.6"
POINTS = 1
HINT = "round up"


def graph_gain(launches, host, device, graph, gap, capture):
    saved = max(launches * host, device) - (graph + device + (launches - 1) * gap)
    return saved, math.floor(capture / saved) if saved > 0 else None
