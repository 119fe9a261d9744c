"""A lease still lives at its end."""

TASK = "15.4"
POINTS = 3
HINT = "now < end"


class Leases:
    def __init__(self, room: int):
        self.room = room
        self.leases: dict[str, tuple[int, int, float]] = {}  # key -> (attempt, amount, end)

    def free(self) -> int:
        return self.room - sum(amount for _, amount, _ in self.leases.values())

    def grant(self, key: str, attempt: int, amount: int, seconds: float, now: float) -> bool:
        self.expire(now)
        theirs = self.leases.get(key)
        if theirs is not None and theirs[0] >= attempt:
            return theirs[0] == attempt
        self.leases.pop(key, None)
        if amount > self.free():
            return False
        self.leases[key] = (attempt, amount, now + seconds)
        return True

    def valid(self, key: str, attempt: int, now: float) -> bool:
        theirs = self.leases.get(key)
        return theirs is not None and theirs[0] == attempt and now <= theirs[2]

    def renew(self, key: str, attempt: int, seconds: float, now: float) -> bool:
        if not self.valid(key, attempt, now):
            return False
        self.leases[key] = (attempt, self.leases[key][1], now + seconds)
        return True

    def release(self, key: str, attempt: int) -> int:
        if key not in self.leases or self.leases[key][0] != attempt:
            return 0
        return self.leases.pop(key)[1]

    def expire(self, now: float) -> list[str]:
        over = sorted(key for key, (_, _, end) in self.leases.items() if now > end)
        for key in over:
            del self.leases[key]
        return over
