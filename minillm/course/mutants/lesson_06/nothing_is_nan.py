"""A head without tokens becomes NaN."""

TASK = "06.6"
POINTS = 6
HINT = "-inf minus -inf is NaN"


def merge_parts(partial, lse):
    empty = lse == float("-inf")
    top = lse.amax(-1, keepdim=True)
    weight = (lse - top).exp()
    total = weight.sum(-1, keepdim=True)
    mixed = (weight[..., None] * partial.masked_fill(empty[..., None], 0.0)).sum(-2)
    return mixed / total.clamp_min(1e-30), (top + total.log())[..., 0]
