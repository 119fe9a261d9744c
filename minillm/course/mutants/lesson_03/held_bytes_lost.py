"""finish() forgets what was held."""

TASK = "03.7"
POINTS = 5
HINT = "held text is lost"


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
        return delta

    def finish(self):
        return ""
