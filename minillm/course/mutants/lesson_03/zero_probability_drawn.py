"""Greater or equal: at 0 a token that cannot be comes out."""

TASK = "03.6"
POINTS = 4
HINT = "first running sum greater than u"


def draw(probabilities, seeds, positions, uniform):
    tokens = []
    for row, seed, position in zip(probabilities.double(), seeds, positions):
        passed = row.cumsum(0) < uniform(seed, position)
        tokens.append(min(int(passed.sum()), int(row.nonzero().max())))
    return tokens
