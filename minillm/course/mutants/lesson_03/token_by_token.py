"""Every token decoded on its own."""

TASK = "03.7"
POINTS = 0
HINT = "a token alone may be half a character"


class Detokenizer:
    def __init__(self, decode):
        self.decode = decode

    def append(self, token):
        return self.decode([token])

    def finish(self):
        return ""
