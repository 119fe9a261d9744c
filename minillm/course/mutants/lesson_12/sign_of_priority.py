"""A larger priority is served first."""

TASK = "12.3"
POINTS = 3
HINT = "a smaller priority is served first"


class Policy:
    def key(self, request: dict) -> float:
        return request["arrival"] - 10.0 * request["priority"]

    def victim(self, running: list[dict]) -> str:
        return max(running, key=self.key)["id"]
