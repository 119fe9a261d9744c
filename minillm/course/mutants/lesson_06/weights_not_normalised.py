"""Too large by up to the number of parts."""

TASK = "06.6"
POINTS = 0
HINT = "divide by the sum of the weights"


def merge_parts(partial, lse):
    empty = lse == float("-inf")
    top = lse.amax(-1, keepdim=True)
    weight = (lse - top.masked_fill(top == float("-inf"), 0.0)).exp()
    total = weight.sum(-1, keepdim=True)
    mixed = (weight[..., None] * partial.masked_fill(empty[..., None], 0.0)).sum(-2)
    return mixed, (top + total.log())[..., 0]
