"""Host and device summed, as if one waited for the other."""

TASK = "07.1"
POINTS = 4.5
HINT = "that is the sum"


def predict():
    return {"launches": 312, "host_ms": 312 * 6e-3, "device_ms": 0.5, "eager_ms": 312 * 6e-3 + 0.5, "streams": 42}
