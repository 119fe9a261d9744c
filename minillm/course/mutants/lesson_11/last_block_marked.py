"""A hit marks only its last block."""

TASK = "11.4"
POINTS = 8
HINT = "uses all before it"


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
            last = node
            ids.append(node["id"])
        if ids:
            last["used"] = self.now
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
            leaves, stack = [], [self.root]
            while stack:
                parent = stack.pop()
                for key, node in parent["below"].items():
                    if node["below"]:
                        stack.append(node)
                    elif node["id"] not in held:
                        leaves.append((node["used"], node["id"], parent, key))
            if not leaves:
                break
            _, id, parent, key = min(leaves, key=lambda leaf: leaf[:2])
            del parent["below"][key]
            gone.append(id)
        return gone
