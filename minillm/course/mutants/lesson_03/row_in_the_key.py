"""The row of the batch goes into the key."""

TASK = "03.6"
POINTS = 3
HINT = "the row is no part of the key"


def draw(probabilities, seeds, positions, uniform):
    tokens = []
    for i, (row, seed, position) in enumerate(zip(probabilities.double(), seeds, positions)):
        passed = row.cumsum(0) <= uniform(seed + i, position)
        tokens.append(min(int(passed.sum()), int(row.nonzero().max())))
    return tokens
