"""A twin takes the place of the block that requests hold."""

TASK = "11.3"
POINTS = 2
HINT = "a twin does not replace"


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
        return ids

    def insert(self, keys: list[tuple], ids: list[int]) -> list[int]:
        self.now += 1
        node, new = self.root, []
        for key, id in zip(keys, ids):
            if key not in node["below"]:
                node["below"][key] = {"id": id, "used": 0, "below": {}}
                new.append(id)
            node = node["below"][key]
            node["id"] = id
            node["used"] = self.now
        return list(ids)
