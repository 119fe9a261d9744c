"""A beginning that fails is shown as a whole."""

TASK = "13.6"
POINTS = 11
HINT = "its end may begin the stop again"


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
            begun = [s for s in self.stops if len(self.tail) < len(s) and s.startswith(self.tail)]
            keep = len(self.tail) if begun else int(any(len(s) > 1 and s[0] == character for s in self.stops))
            out += character if self.include else self.tail[: len(self.tail) - keep]
            self.tail = self.tail[len(self.tail) - keep :]
        return out

    def finish(self) -> str:
        held, self.tail = self.tail, ""
        return "" if self.include else held
