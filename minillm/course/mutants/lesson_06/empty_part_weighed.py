"""0 times NaN."""

TASK = "06.6"
POINTS = 5
HINT = "0 times NaN is NaN"


def merge_parts(partial, lse):
    top = lse.amax(-1, keepdim=True)
    weight = (lse - top.masked_fill(top == float("-inf"), 0.0)).exp()
    total = weight.sum(-1, keepdim=True)
    mixed = (weight[..., None] * partial).sum(-2)
    return mixed / total.clamp_min(1e-30), (top + total.log())[..., 0]
