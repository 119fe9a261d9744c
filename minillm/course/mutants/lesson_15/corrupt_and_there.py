"""A piece that seems to be there is dropped before anybody looks at its checksum."""

TASK = "15.3"
POINTS = 17
HINT = "a wrong checksum fails, also where"


class DecodeTransfer:
    def __init__(self, attempt, token_hash, num_tokens, num_layers, expires):
        self.attempt, self.token_hash, self.num_tokens = attempt, token_hash, num_tokens
        self.expires = expires
        self.state = "submitted"
        self.epoch = None
        self.there = [0] * num_layers

    @property
    def held(self):
        return self.state in ("reserved", "receiving")

    def fail(self):
        return self.end("recompute", ("send", "cancel"), ("recompute",))

    def end(self, state, *actions):
        held, self.state = self.held, state
        back = [("give_back",)] if held and state != "loaded" else []
        return back + list(actions)

    def feed(self, event, now):
        what = event["what"]
        if self.state in ("loaded", "recompute", "cancelled"):
            return []
        if what == "aborted":
            return self.end("cancelled", ("send", "cancel"))
        if now >= self.expires or what in ("peer_lost", "gave_way"):
            return self.fail()
        if what == "tick":
            return []
        if event["attempt"] != self.attempt:
            return []
        if what == "refused":
            return self.fail()
        if what == "reserve":
            return self.reserve(event)
        if self.epoch is None or event["epoch"] != self.epoch:
            return []
        return self.piece(event) if what == "piece" else self.done(event)

    def reserve(self, event):
        if self.state != "submitted":
            return []
        if event["token_hash"] != self.token_hash or event["num_tokens"] != self.num_tokens or not event["room"]:
            return self.fail()
        self.epoch, self.state = event["epoch"], "reserved"
        return [("hold",), ("send", "reserved")]

    def piece(self, event):
        layer, start, count = event["layer"], event["start"], event["count"]
        if start < self.there[layer]:
            return []
        if not event["ok"] or start > self.there[layer]:
            return self.fail()
        self.state = "receiving"
        self.there[layer] += count
        return [("write", layer, start, count)]

    def done(self, event):
        if all(n == self.num_tokens for n in self.there):
            return self.end("loaded", ("send", "ack"), ("resume", self.num_tokens))
        return self.fail()
