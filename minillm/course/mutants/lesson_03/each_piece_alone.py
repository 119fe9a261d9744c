"""A stop is found only inside one piece of text."""

TASK = "03.8"
POINTS = 0
HINT = "may span pieces"


class StopStrings:
    def __init__(self, stop, include_stop):
        self.stop, self.include_stop, self.matched, self.held = stop, include_stop, None, ""

    def feed(self, text):
        if self.matched is not None:
            return ""
        text, self.held = text, ""
        ends = [(text.find(s) + len(s), -len(s), s) for s in self.stop if s in text]
        if ends:
            end, length, self.matched = min(ends)
            return text[:end] if self.include_stop else text[: end + length]
        return text

    def finish(self):
        held, self.held = self.held, ""
        return held
