"""The kernels outside the layers forgotten: launches and host time."""

TASK = "07.1"
POINTS = 3.5
HINT = "outside the layers are launched too"


def predict():
    return {"launches": 308, "host_ms": 308 * 6e-3, "device_ms": 0.5, "eager_ms": 312 * 6e-3, "streams": 42}
