"""eps added to the root instead of under it; only small numbers show it."""

TASK = "01.2"
POINTS = 3
HINT = "eps is added under the root"


def rms_norm(x, weight, eps):
    h = x.float()
    return (h / (h.pow(2).mean(-1, keepdim=True).sqrt() + eps) * weight.float()).to(x.dtype)
