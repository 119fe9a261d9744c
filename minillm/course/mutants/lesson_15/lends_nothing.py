"""Nothing is ever lent, so nothing can stay behind."""

TASK = "15.4"
POINTS = 0
HINT = "`grant` lends what is free"


class Leases:
    def __init__(self, room: int):
        self.room = room

    def free(self) -> int:
        return self.room

    def grant(self, key: str, attempt: int, amount: int, seconds: float, now: float) -> bool:
        return False

    def valid(self, key: str, attempt: int, now: float) -> bool:
        return False

    def renew(self, key: str, attempt: int, seconds: float, now: float) -> bool:
        return False

    def release(self, key: str, attempt: int) -> int:
        return 0

    def expire(self, now: float) -> list[str]:
        return []
