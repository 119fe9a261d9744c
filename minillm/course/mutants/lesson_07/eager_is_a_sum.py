"""Host and device summed."""

import math

TASK = "07.6"
POINTS = 0
HINT = "takes the longer, not the sum"


def graph_gain(launches, host, device, graph, gap, capture):
    saved = launches * host + device - (graph + device + (launches - 1) * gap)
    return saved, math.ceil(capture / saved) if saved > 0 else None
