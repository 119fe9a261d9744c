"""All text is shown at once; the stop is found when its beginning is already out."""

TASK = "03.8"
POINTS = 1
HINT = "hold back what may be its beginning"


class StopStrings:
    def __init__(self, stop, include_stop):
        self.stop, self.include_stop, self.matched, self.text = stop, include_stop, None, ""

    def feed(self, text):
        if self.matched is not None:
            return ""
        shown, self.text = len(self.text), self.text + text
        ends = [(self.text.find(s) + len(s), -len(s), s) for s in self.stop if s in self.text]
        if not ends:
            return text
        end, length, self.matched = min(ends)
        return self.text[shown : end if self.include_stop else max(shown, end + length)]

    def finish(self):
        return ""
