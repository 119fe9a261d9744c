"""The stop that stands first in the list wins."""

TASK = "13.6"
POINTS = 11
HINT = "not the first of the list"


class StreamStops:
    def __init__(self, stops: list[str], include: bool):
        self.stops, self.include = stops, include
        self.matched: str | None = None
        self.tail = ""

    def feed(self, text: str, enabled: bool = True) -> str:
        whole = self.tail + text
        for s in self.stops:
            if s in whole and enabled and self.matched is None:
                self.matched = s
                end = whole.find(s) + (len(s) if self.include else 0)
                shown = len(self.tail) if self.include else 0
                self.tail = ""
                return whole[shown:end]
        out = ""
        for character in text if self.matched is None else "":
            self.tail += character
            done = [s for s in self.stops if self.tail.endswith(s)]
            if done and enabled:
                self.matched = max(done, key=len)
                out += character if self.include else self.tail[: len(self.tail) - len(self.matched)]
                self.tail = ""
                return out
            keep = max((n for s in self.stops for n in range(len(s)) if self.tail.endswith(s[:n])), default=0)
            out += character if self.include else self.tail[: len(self.tail) - keep]
            self.tail = self.tail[len(self.tail) - keep :]
        return out

    def finish(self) -> str:
        held, self.tail = self.tail, ""
        return "" if self.include else held
