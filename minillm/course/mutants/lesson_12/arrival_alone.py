"""Priority does not count."""

TASK = "12.3"
POINTS = 3
HINT = "priority must count"


class Policy:
    def key(self, request: dict) -> float:
        return request["arrival"]

    def victim(self, running: list[dict]) -> str:
        return max(running, key=self.key)["id"]
