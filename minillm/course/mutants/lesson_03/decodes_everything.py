"""Correct, at a cost that grows with the text."""

TASK = "03.7"
POINTS = 5
HINT = "costs O(T^2)"


class Detokenizer:
    def __init__(self, decode):
        self.decode, self.window, self.sent = decode, [], 0

    def append(self, token):
        self.window.append(token)
        text = self.decode(self.window)
        final = len(text) - text.endswith("\ufffd")
        delta, self.sent = text[self.sent : final], final
        return delta

    def finish(self):
        return self.decode(self.window)[self.sent :]
