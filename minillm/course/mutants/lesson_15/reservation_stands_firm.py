"""A reservation does not give way to a running request."""

TASK = "15.3"
POINTS = 17
HINT = "gives way to a request that runs"


class DecodeTransfer:
    def __init__(self, attempt: int, token_hash: str, num_tokens: int, num_layers: int, expires: float):
        self.attempt, self.token_hash, self.num_tokens = attempt, token_hash, num_tokens
        self.expires = expires  # the end of the lease, in seconds of the clock that `now` is of
        self.state = "submitted"
        self.epoch: str | None = None  # the life of the other side that is accepted
        self.there = [0] * num_layers  # tokens of each layer that are there

    @property
    def held(self) -> bool:
        return self.state in ("reserved", "receiving")

    def fail(self) -> list[tuple]:
        return self.end("recompute", ("send", "cancel"), ("recompute",))

    def end(self, state: str, *actions: tuple) -> list[tuple]:
        back = [("give_back",)] if self.held else []
        self.state = state
        return [*back, *actions]

    def feed(self, event: dict, now: float) -> list[tuple]:
        what = event["what"]
        if self.state in ("loaded", "recompute", "cancelled"):
            return []
        if what == "aborted":
            return self.end("cancelled", ("send", "cancel"))
        if now >= self.expires or what == "peer_lost":
            return self.fail()
        if (
            what in ("tick", "gave_way")
            or event["attempt"] != self.attempt
            or (what in ("piece", "done") and event["epoch"] != self.epoch)
        ):
            return []
        rule = {"reserve": self.reserve, "piece": self.piece, "done": self.done}.get(what)
        return rule(event) if rule else self.fail()

    def reserve(self, event: dict) -> list[tuple]:
        if self.state != "submitted":
            return []
        if not event["room"] or (event["token_hash"], event["num_tokens"]) != (self.token_hash, self.num_tokens):
            return self.fail()
        self.state, self.epoch = "reserved", event["epoch"]
        return [("hold",), ("send", "reserved")]

    def piece(self, event: dict) -> list[tuple]:
        layer, start, count = event["layer"], event["start"], event["count"]
        if not event["ok"] or start > self.there[layer]:
            return self.fail()
        if start < self.there[layer]:
            return []
        self.there[layer], self.state = start + count, "receiving"
        return [("write", layer, start, count)]

    def done(self, event: dict) -> list[tuple]:
        if any(tokens != self.num_tokens for tokens in self.there):
            return self.fail()
        self.state = "loaded"
        return [("send", "ack"), ("resume", self.num_tokens)]
