"""The mean of the parts."""

TASK = "06.6"
POINTS = 0
HINT = "not equally"


def merge_parts(partial, lse):
    empty = lse == float("-inf")
    top = lse.amax(-1, keepdim=True)
    weight = (~empty).float()
    total = weight.sum(-1, keepdim=True)
    mixed = (weight[..., None] * partial.masked_fill(empty[..., None], 0.0)).sum(-2)
    return mixed / total.clamp_min(1e-30), (top + total.log())[..., 0]
