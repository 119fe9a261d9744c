"""A block is found by its own key, whatever stands before it."""

TASK = "11.3"
POINTS = 3
HINT = "found at another place"


class PrefixTree:
    def __init__(self):
        self.known = {}

    def match(self, keys: list[tuple]) -> list[int]:
        ids = []
        for key in keys:
            if key not in self.known:
                break
            ids.append(self.known[key])
        return ids

    def insert(self, keys: list[tuple], ids: list[int]) -> list[int]:
        new = []
        for i in range(len(ids)):
            path = tuple(keys[: i + 1])
            if path not in self.known:
                self.known[path] = ids[i]
                self.known[keys[i]] = ids[i]
                new.append(ids[i])
        return new
