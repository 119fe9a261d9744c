"""Only a whole prompt is a hit."""

TASK = "11.3"
POINTS = 2
HINT = "a part of a prompt is a hit, too"


class PrefixTree:
    def __init__(self):
        self.now = 0
        self.root = {"id": 0, "used": 0, "below": {}}

    def match(self, keys: list[tuple]) -> list[int]:
        self.now += 1
        node, ids = self.root, []
        for key in keys:
            node = node["below"].get(key)
            if node is None:
                break
            node["used"] = self.now
            ids.append(node["id"])
        return ids if len(ids) == len(keys) else []

    def insert(self, keys: list[tuple], ids: list[int]) -> list[int]:
        self.now += 1
        node, new = self.root, []
        for key, id in zip(keys, ids):
            if key not in node["below"]:
                node["below"][key] = {"id": id, "used": 0, "below": {}}
                new.append(id)
            node = node["below"][key]
            node["used"] = self.now
        return new
