"""Mistakes of exercise 15 for a transfer: each machine is the reference with one slip, by a flag or in one method."""

from __future__ import annotations

from typing import Any

from minillm.course.checks.transfers import Action, DecodeTransfer, Event
from minillm.course.tasks import Mistake


class GivesBackNothingHeld(DecodeTransfer):
    """Gives back on every end, whether it holds something or not."""

    def end(self, state: str, *actions: Action) -> list[Action]:
        self.state = state
        return [("give_back",), *actions]


class GivesBackLoaded(DecodeTransfer):
    """Gives the blocks back when all is there: the request that resumes on them has none."""

    def done(self) -> list[Action]:
        got = super().done()
        return [("give_back",), *got] if self.state == "loaded" else got


class AsksAttemptFirst(DecodeTransfer):
    """A message of another attempt is dropped before anybody looks at the clock."""

    def feed(self, event: Event, now: float) -> list[Action]:
        return [] if event.get("attempt", self.attempt) != self.attempt else super().feed(event, now)


class RefusedByAnybody(DecodeTransfer):
    """A refusal of an earlier attempt ends this one."""

    def feed(self, event: Event, now: float) -> list[Action]:
        refused = event["what"] == "refused" and self.state not in ("loaded", "recompute", "cancelled")
        return self.fail() if refused else super().feed(event, now)


class SaysReservedAgain(DecodeTransfer):
    """A second `reserve` is answered again."""

    def reserve(self, event: Event) -> list[Action]:
        return super().reserve(event) if self.state == "submitted" else [("send", "reserved")]


class TakesEveryEpoch(DecodeTransfer):
    """A later `reserve` of another epoch changes the accepted one."""

    def reserve(self, event: Event) -> list[Action]:
        got = super().reserve(event)
        self.epoch = event["epoch"]
        return got


class BeginsAgain(DecodeTransfer):
    """A `reserve` of another epoch begins the transfer anew, on blocks that are taken again."""

    def reserve(self, event: Event) -> list[Action]:
        if self.state != "submitted" and event["epoch"] != self.epoch:
            self.state = "submitted"
        return super().reserve(event)


class WaitsForRoom(DecodeTransfer):
    """Without room it waits for another `reserve`."""

    def reserve(self, event: Event) -> list[Action]:
        return [] if self.state == "submitted" and not event["room"] else super().reserve(event)


class WaitsForItsPrompt(DecodeTransfer):
    """A `reserve` for other tokens is dropped as if it were stale."""

    def reserve(self, event: Event) -> list[Action]:
        other = (event["token_hash"], event["num_tokens"]) != (self.token_hash, self.num_tokens)
        return [] if self.state == "submitted" and other else super().reserve(event)


class SkipsCorrupt(DecodeTransfer):
    """A corrupt piece is dropped, as if it were sent again."""

    def piece(self, event: Event) -> list[Action]:
        return super().piece(event) if event["ok"] else []


class LayerByLayer(DecodeTransfer):
    """A piece of a layer before the layers below it are complete is taken for a gap."""

    def piece(self, event: Event) -> list[Action]:
        early = any(n < self.num_tokens for n in self.there[: event["layer"]])
        return self.fail() if early else super().piece(event)


class LoadsAtOnce(DecodeTransfer):
    """It resumes on the last piece, without `done`."""

    def piece(self, event: Event) -> list[Action]:
        got = super().piece(event)
        return [*got, *self.done()] if got and self.there == [self.num_tokens] * self.num_layers else got


class StaysReserved(DecodeTransfer):
    """The state does not say that pieces have come."""

    def piece(self, event: Event) -> list[Action]:
        got = super().piece(event)
        self.state = "reserved" if self.state == "receiving" else self.state
        return got


class WaitsForTheRest(DecodeTransfer):
    """`done` before all is there is not believed, and what is missing is waited for."""

    def done(self) -> list[Action]:
        return super().done() if self.there == [self.num_tokens] * self.num_layers else []


class NoAck(DecodeTransfer):
    """The other side is not told that all has come."""

    def done(self) -> list[Action]:
        return [a for a in super().done() if a != ("send", "ack")]


class ResumesOnTheSum(DecodeTransfer):
    """Tokens are summed over layers."""

    def done(self) -> list[Action]:
        return [("resume", sum(self.there)) if a[0] == "resume" else a for a in super().done()]


class LeavesSilently(DecodeTransfer):
    """A client that leaves is not told to the other side."""

    def end(self, state: str, *actions: Action) -> list[Action]:
        return super().end(state, *(() if state == "cancelled" else actions))


class LossOnlyWhileHeld(DecodeTransfer):
    """A line that breaks before `reserve` is nothing to it."""

    def feed(self, event: Event, now: float) -> list[Action]:
        early = event["what"] in ("peer_lost", "gave_way") and self.state == "submitted" and now < self.expires
        return [] if early else super().feed(event, now)


def transfer(**flags: Any) -> Any:
    return type("DecodeTransfer", (DecodeTransfer,), flags)


MISTAKES = [
    Mistake("a leaked reservation: `fail` gives back what is held", transfer(gives_back=False)),
    Mistake("a leaked reservation: a client that leaves leaves blocks behind", transfer(gives_back_on_cancel=False)),
    Mistake("give back only what is held", GivesBackNothingHeld),
    Mistake("once loaded, the blocks are the request's: they are not given back", GivesBackLoaded),
    Mistake("an earlier attempt still speaks: drop what is not of this one", transfer(attempts=False)),
    Mistake("a stale ticket: drop what is of another epoch than the accepted one", transfer(epochs=False)),
    Mistake("before `reserve` nothing is accepted: there is no epoch yet, and no room", transfer(early=False)),
    Mistake("the hash in `reserve` says whose prompt it is: compare it", transfer(hashes=False)),
    Mistake("num_tokens in `reserve` is what was promised: compare it", transfer(lengths=False)),
    Mistake("no room is a no: blocks cannot be held", transfer(rooms=False)),
    Mistake("a corrupt piece was counted: a wrong checksum fails", transfer(judges=False)),
    Mistake(
        "a wrong checksum fails, also where the piece seems to be there already: its layer and start may be what "
        "has changed",
        transfer(judges_first=False),
    ),
    Mistake("a piece is missing before this one: fail", transfer(gaps=False)),
    Mistake("a piece that is there already counts once, and is not written again", transfer(knows_twice=False)),
    Mistake("resumed before all layers were there", transfer(counts=False)),
    Mistake("every layer must be complete, not only the last", transfer(all_layers=False)),
    Mistake("`reserve` came again: it holds once", transfer(once_held=False)),
    Mistake("resumed twice: at an end nothing happens any more", transfer(stays_loaded=False)),
    Mistake("the request runs, or is computed, already: an end is an end", transfer(stays_ended=False)),
    Mistake("without the lease, who never hears again holds for ever", transfer(leases=False)),
    Mistake("the lease is looked at before anything is written: late is late", transfer(leases_first=False)),
    Mistake("at `expires` the lease is over: now >= expires", transfer(inclusive=False)),
    Mistake("nothing that comes prolongs this lease: `expires` stays", transfer(renews=True)),
    Mistake("the line is gone: nobody will send the rest", transfer(ends_on_loss=False)),
    Mistake("a reservation gives way to a request that runs", transfer(gives_way=False)),
    Mistake('who fails says "cancel", or the other side goes on for nobody', transfer(tells=False)),
    Mistake("a client that left wants nothing recomputed", transfer(cancels=False)),
    Mistake("time passes with every message, a stale one, too: the clock comes before the attempt", AsksAttemptFirst),
    Mistake("a refusal of an earlier attempt says nothing of this one", RefusedByAnybody),
    Mistake('"reserved" is said once: a second `reserve` is nothing', SaysReservedAgain),
    Mistake("an epoch that is accepted stays: a later `reserve` does not change it", TakesEveryEpoch),
    Mistake("`reserve` came again: it holds once", BeginsAgain),
    Mistake("no room is a no, and nobody asks again: fail", WaitsForRoom),
    Mistake("of this attempt, and for other tokens: that is no stale message, it is wrong. Fail", WaitsForItsPrompt),
    Mistake("a corrupt piece is not sent again: fail", SkipsCorrupt),
    Mistake(
        "only within a layer have pieces an order: of a chunk all layers come, then of the next chunk", LayerByLayer
    ),
    Mistake('all pieces are there, but it is "done" that says so: wait for it', LoadsAtOnce),
    Mistake('the first piece changes the state to "receiving"', StaysReserved),
    Mistake('after "done" nothing more comes: what is missing now will never be there', WaitsForTheRest),
    Mistake('"ack" lets the other side go before its lease ends: send it', NoAck),
    Mistake("num_tokens is what each layer has, not their sum", ResumesOnTheSum),
    Mistake("a client that leaves is told to the other side, or it computes for nobody", LeavesSilently),
    Mistake('a line that breaks while "submitted" has lost this request as well: fail', LossOnlyWhileHeld),
]
