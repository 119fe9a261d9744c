"""The host's time in microseconds."""

TASK = "07.1"
POINTS = 4.5
HINT = "in microseconds"


def predict():
    return {"launches": 312, "host_ms": 312 * 6, "device_ms": 0.5, "eager_ms": 312 * 6e-3, "streams": 42}
