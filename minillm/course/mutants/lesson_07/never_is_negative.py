"""A loss divided like a gain."""

import math

TASK = "07.6"
POINTS = 2
HINT = "never pays its capture"


def graph_gain(launches, host, device, graph, gap, capture):
    saved = max(launches * host, device) - (graph + device + (launches - 1) * gap)
    return saved, math.ceil(capture / saved)
