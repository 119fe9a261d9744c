"""Waiting does not count."""

TASK = "12.3"
POINTS = 1
HINT = "waiting must count"


class Policy:
    def key(self, request: dict) -> float:
        return float(request["priority"])

    def victim(self, running: list[dict]) -> str:
        return max(running, key=self.key)["id"]
