"""The time in seconds."""

TASK = "04.1"
POINTS = 4
HINT = "asks for milliseconds"


def predict():
    unfused = (2 + 2 + 2) + (2 + 4) + (4 + 4) + 4 + (4 + 4) + (4 + 2) + (2 + 2)
    fused = 2 + 2 + 2 + 2
    swiglu_unfused, swiglu_fused = 5 * 2, 3 * 2
    saved = 2 * 4096 * (unfused - fused) + 14336 * (swiglu_unfused - swiglu_fused)
    return {
        "norm_unfused": unfused,
        "norm_fused": fused,
        "swiglu_ratio": swiglu_unfused / swiglu_fused,
        "saved_ms": 32 * 8192 * saved / 2e12,
    }
