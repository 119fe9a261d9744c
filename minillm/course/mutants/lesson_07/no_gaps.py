"""Kernels in a graph follow each other at once."""

import math

TASK = "07.6"
POINTS = 0
HINT = "one less than there are kernels"


def graph_gain(launches, host, device, graph, gap, capture):
    saved = max(launches * host, device) - (graph + device)
    return saved, math.ceil(capture / saved) if saved > 0 else None
