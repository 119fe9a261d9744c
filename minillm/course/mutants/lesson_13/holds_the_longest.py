"""As much is held as the longest stop could need."""

TASK = "13.6"
POINTS = 9
HINT = "hold back only what may still become a stop"


class StreamStops:
    def __init__(self, stops: list[str], include: bool):
        self.stops, self.include = stops, include
        self.matched: str | None = None
        self.tail = ""

    def feed(self, text: str, enabled: bool = True) -> str:
        out = ""
        for character in text if self.matched is None else "":
            self.tail += character
            done = [s for s in self.stops if self.tail.endswith(s)]
            if done and enabled:
                self.matched = max(done, key=len)
                out += character if self.include else self.tail[: len(self.tail) - len(self.matched)]
                self.tail = ""
                return out
            keep = min(len(self.tail), max((len(s) - 1 for s in self.stops), default=0))
            out += character if self.include else self.tail[: len(self.tail) - keep]
            self.tail = self.tail[len(self.tail) - keep :]
        return out

    def finish(self) -> str:
        held, self.tail = self.tail, ""
        return "" if self.include else held
