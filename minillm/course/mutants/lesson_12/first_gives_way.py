"""The one that is served first."""

TASK = "12.3"
POINTS = 2
HINT = "that one is served first"


class Policy:
    def key(self, request: dict) -> float:
        return request["arrival"] + 10.0 * request["priority"]

    def victim(self, running: list[dict]) -> str:
        return min(running, key=self.key)["id"]
