"""The bytes of the weights not taken off."""

TASK = "07.1"
POINTS = 4.5
HINT = "take their bytes off first"


def predict():
    return {"launches": 312, "host_ms": 312 * 6e-3, "device_ms": 0.5, "eager_ms": 312 * 6e-3, "streams": 57}
