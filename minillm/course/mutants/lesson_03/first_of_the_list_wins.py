"""Stops tried in the order given."""

TASK = "03.8"
POINTS = 5
HINT = "not the first of the list"


class StopStrings:
    def __init__(self, stop, include_stop):
        self.stop, self.include_stop, self.matched, self.held = stop, include_stop, None, ""

    def feed(self, text):
        if self.matched is not None:
            return ""
        text, self.held = self.held + text, ""
        ends = [(text.find(s) + len(s), -len(s), s) for s in self.stop if s in text]
        if ends:
            end, length, self.matched = ends[0]
            return text[:end] if self.include_stop else text[: end + length]
        keep = max(n for s in self.stop for n in range(len(s)) if text.endswith(s[:n]))
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self):
        held, self.held = self.held, ""
        return held
