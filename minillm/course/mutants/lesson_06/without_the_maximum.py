"""exp of the lse itself."""

TASK = "06.6"
POINTS = 5
HINT = "merge without the maximum"


def merge_parts(partial, lse):
    empty = lse == float("-inf")
    top = 0.0 * lse[:, :1].masked_fill(empty[:, :1], 0.0)
    weight = (lse - top.masked_fill(top == float("-inf"), 0.0)).exp()
    total = weight.sum(-1, keepdim=True)
    mixed = (weight[..., None] * partial.masked_fill(empty[..., None], 0.0)).sum(-2)
    return mixed / total.clamp_min(1e-30), (top + total.log())[..., 0]
