"""The number lies beyond the sum: the last token of the vocabulary comes out, a banned one."""

TASK = "03.6"
POINTS = 4
HINT = "takes what is left"


def draw(probabilities, seeds, positions, uniform):
    tokens = []
    for row, seed, position in zip(probabilities.double(), seeds, positions):
        passed = row.cumsum(0) <= uniform(seed, position)
        tokens.append(min(int(passed.sum()), len(row) - 1))
    return tokens
