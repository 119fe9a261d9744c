"""U+FFFD is deleted wherever it comes up."""

TASK = "03.7"
POINTS = 5
HINT = "hold it, do not delete it"


class Detokenizer:
    def __init__(self, decode):
        self.decode, self.window, self.sent = decode, [], 0

    def append(self, token):
        self.window.append(token)
        text = self.decode(self.window)
        final = len(text) - text.endswith("\ufffd")
        delta, self.sent = text[self.sent : final], final
        if final == len(text):
            self.window, self.sent = [], 0
        return delta.replace("\ufffd", "")

    def finish(self):
        return self.decode(self.window)[self.sent :]
