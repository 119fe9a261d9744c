"""The one that frees the most."""

TASK = "12.3"
POINTS = 2
HINT = "livelock"


class Policy:
    def key(self, request: dict) -> float:
        return request["arrival"] + 10.0 * request["priority"]

    def victim(self, running: list[dict]) -> str:
        return max(running, key=lambda r: r["blocks"])["id"]
