"""An eager step as long as its launches."""

import math

TASK = "07.6"
POINTS = 2
HINT = "never shorter than its device time"


def graph_gain(launches, host, device, graph, gap, capture):
    saved = launches * host - (graph + device + (launches - 1) * gap)
    return saved, math.ceil(capture / saved) if saved > 0 else None
