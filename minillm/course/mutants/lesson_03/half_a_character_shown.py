"""The replacement character is sent, and the real one never."""

TASK = "03.7"
POINTS = 0
HINT = "hold it back while it ends the text"


class Detokenizer:
    def __init__(self, decode):
        self.decode, self.window, self.sent = decode, [], 0

    def append(self, token):
        self.window.append(token)
        text = self.decode(self.window)
        final = len(text)
        delta, self.sent = text[self.sent : final], final
        if not text.endswith("\ufffd"):
            self.window, self.sent = [], 0
        return delta

    def finish(self):
        return self.decode(self.window)[self.sent :]
