"""The oldest block leaves, whatever follows it: orphans."""

TASK = "11.4"
POINTS = 0
HINT = "orphans"


class PrefixCache:
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
            node["used"] = self.now
        return new

    def evict(self, n: int, held: list[int]) -> list[int]:
        gone = []
        while len(gone) < n:
            found, stack = [], [(self.root, 0)]
            while stack:
                parent, depth = stack.pop()
                for key, node in parent["below"].items():
                    stack.append((node, depth + 1))
                    if node["id"] not in held:
                        found.append((node["used"], depth, node["id"], parent, key))
            if not found:
                break
            _, _, id, parent, key = min(found, key=lambda f: f[:3])
            del parent["below"][key]
            gone.append(id)
        return gone
