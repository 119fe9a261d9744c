"""A stop counts while none may."""

TASK = "13.6"
POINTS = 11
HINT = "does not count"


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
            if done:
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
