"""Correct text, late: as many characters held as a stop is long."""

TASK = "03.8"
POINTS = 3.5
HINT = "hold back only what may be the beginning"


class StopStrings:
    def __init__(self, stop, include_stop):
        self.stop, self.include_stop, self.matched, self.held = stop, include_stop, None, ""

    def feed(self, text):
        if self.matched is not None:
            return ""
        text, self.held = self.held + text, ""
        ends = [(text.find(s) + len(s), -len(s), s) for s in self.stop if s in text]
        if ends:
            end, length, self.matched = min(ends)
            return text[:end] if self.include_stop else text[: end + length]
        keep = min(len(text), max(map(len, self.stop)) - 1)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self):
        held, self.held = self.held, ""
        return held
