"""Every message ends in a recompute: always right, and nothing is ever moved."""

TASK = "15.3"
POINTS = 0
HINT = "as it was promised is loaded"


class DecodeTransfer:
    def __init__(self, attempt: int, token_hash: str, num_tokens: int, num_layers: int, expires: float):
        self.state = "submitted"

    def feed(self, event: dict, now: float) -> list[tuple]:
        if self.state != "submitted":
            return []
        if event["what"] == "aborted":
            self.state = "cancelled"
            return [("send", "cancel")]
        self.state = "recompute"
        return [("send", "cancel"), ("recompute",)]
