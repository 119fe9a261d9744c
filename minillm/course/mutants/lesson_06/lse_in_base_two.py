"""exp2 for a natural logarithm."""

TASK = "06.6"
POINTS = 0
HINT = "exp, not exp2"


def merge_parts(partial, lse):
    empty = lse == float("-inf")
    top = lse.amax(-1, keepdim=True)
    weight = (lse - top.masked_fill(top == float("-inf"), 0.0)).exp2()
    total = weight.sum(-1, keepdim=True)
    mixed = (weight[..., None] * partial.masked_fill(empty[..., None], 0.0)).sum(-2)
    return mixed / total.clamp_min(1e-30), (top + total.log())[..., 0]
