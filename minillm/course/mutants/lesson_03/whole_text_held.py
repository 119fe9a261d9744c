"""Nothing is sent while the text ends inside a character."""

TASK = "03.7"
POINTS = 3
HINT = "not the text before it"


class Detokenizer:
    def __init__(self, decode):
        self.decode, self.window, self.sent = decode, [], 0

    def append(self, token):
        self.window.append(token)
        text = self.decode(self.window)
        final = self.sent if text.endswith("\ufffd") else len(text)
        delta, self.sent = text[self.sent : final], final
        if final == len(text):
            self.window, self.sent = [], 0
        return delta

    def finish(self):
        return self.decode(self.window)[self.sent :]
