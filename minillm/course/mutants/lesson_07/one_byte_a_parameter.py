"""bf16 taken for one byte."""

TASK = "07.1"
POINTS = 4.5
HINT = "two bytes a parameter"


def predict():
    return {"launches": 312, "host_ms": 312 * 6e-3, "device_ms": 0.25, "eager_ms": 312 * 6e-3, "streams": 42}
