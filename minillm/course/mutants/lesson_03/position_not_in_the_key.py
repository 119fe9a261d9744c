"""Every step of a request draws with the same number."""

TASK = "03.6"
POINTS = 1
HINT = "the position is missing from the key"


def draw(probabilities, seeds, positions, uniform):
    tokens = []
    for row, seed in zip(probabilities.double(), seeds):
        passed = row.cumsum(0) <= uniform(seed, 0)
        tokens.append(min(int(passed.sum()), int(row.nonzero().max())))
    return tokens
