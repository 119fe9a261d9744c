"""References and mistakes of exercise 13 for stop strings in a live stream.

The reference keeps all text and looks at its end after each character: slow, and plainly right. Pieces come as a
network or a detokenizer cuts them, so a text is played with several cuts.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence
from typing import Any

Piece = tuple[str, bool]  # text, whether a stop that it completes counts
Stream = tuple[list[Piece], list[str], bool]  # pieces, stops, include


class StreamStops:
    """The flags make wrong ones. rank: which of the stops in a piece wins, where it is not the one completed first."""

    rank = ""  # "start", "list"
    longer = True
    leak = longest = first_held = counts_always = forgets = delays = loses = talks_on = normalises = spent = False

    def __init__(self, stops: list[str], include: bool):
        self.stops, self.include = list(stops), include
        self.matched: str | None = None
        self.text, self.shown = "", 0  # shown: how many characters of the text are out

    def feed(self, text: str, enabled: bool = True) -> str:
        if self.matched is not None:
            return text if self.talks_on else ""
        if self.forgets and not enabled:
            out = self._release(len(self.text)) + text
            self.text, self.shown = "", 0
            return out
        counts = enabled or self.counts_always
        if self.rank and counts and (found := self._found_in(self.text + text)) is not None:
            at, stop = found
            self.text = (self.text + text)[: at + len(stop)]
            return self._match(stop)
        for character in text:
            self.text += character
            done = [s for s in self.stops if self._ends_with(s)]
            if done and counts:
                return self._match(max(done, key=len) if self.longer else min(done, key=len))
        return self._release(len(self.text) - self._held())

    def finish(self) -> str:
        return "" if self.loses or self.matched is not None else self._release(len(self.text))

    def _found_in(self, text: str) -> tuple[int, str] | None:
        found = [(at, s) for s in self.stops if (at := text.find(s, self.shown)) >= 0]
        return (min(found) if self.rank == "start" else found[0]) if found else None

    def _ends_with(self, stop: str) -> bool:
        if self.normalises:
            return unicodedata.normalize("NFC", self.text).endswith(unicodedata.normalize("NFC", stop))
        return self.text.endswith(stop)

    def _match(self, stop: str) -> str:
        self.matched = stop
        return self._release(len(self.text) - (0 if self.include else len(stop)))

    def _held(self) -> int:
        if self.leak or not self.stops or (self.include and not self.delays):
            return 0
        if self.longest:
            return max(map(len, self.stops)) - 1
        stops = self.stops[:1] if self.first_held else self.stops
        return max(n for s in stops for n in range(len(s) + self.spent) if self.text.endswith(s[:n]))

    def _release(self, end: int) -> str:
        out = self.text[self.shown : max(end, self.shown)]
        self.shown += len(out)
        return out


class StartsAgain(StreamStops):
    """One counter a stop, back to nothing when a character does not fit: the classic slip."""

    def __init__(self, stops: list[str], include: bool):
        super().__init__(stops, include)
        self.counts = [0] * len(stops)

    def feed(self, text: str, enabled: bool = True) -> str:
        if self.matched is not None:
            return ""
        for character in text:
            self.text += character
            done = []
            for i, stop in enumerate(self.stops):
                n = self.counts[i]
                self.counts[i] = n + 1 if stop[n] == character else int(stop[0] == character)
                if self.counts[i] == len(stop):
                    done.append(stop)
                    self.counts[i] = 0
            if done and enabled:
                return self._match(max(done, key=len))
        return self._release(len(self.text) - (0 if self.include else max(self.counts, default=0)))


def variant(**flags: Any) -> Any:
    return type("StreamStops", (StreamStops,), flags)


# Streams


def cuts(text: str, seed: int, count: int = 3) -> list[list[str]]:
    """The text in single characters, in one piece, and in `count` random ways (some pieces are empty)."""
    rng, ways = random.Random(seed), [list(text), [text]]
    for _ in range(count):
        at = sorted(rng.randint(0, len(text)) for _ in range(max(2, len(text) // 3)))
        ways.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    return ways


def streams(seed: int, *texts: tuple[str, list[str]], include: bool = False) -> list[Stream]:
    return [
        ([(piece, True) for piece in way], stops, include) for text, stops in texts for way in cuts(text, seed)
    ]  # fmt: skip


def all_on(*pieces: str) -> list[Piece]:
    return [(piece, True) for piece in pieces]


def off_until(n: int, text: str) -> list[Piece]:
    """Single characters; stops count from character n on."""
    return [(character, i >= n) for i, character in enumerate(text)]


def read(function: Any, given: Sequence[Stream]) -> Any:
    """All that a reader has seen in the end, whenever it came, and that nothing comes after a stop."""
    said = {}
    for pieces, stops, include in given:
        one = function(list(stops), include)
        deltas = [one.feed(text) if counts else one.feed(text, False) for text, counts in pieces]
        matched = one.matched
        said[_name(pieces, stops)] = {
            "text": "".join([*deltas, one.finish()]), "matched": matched,
            "after the stop": one.feed("more") if matched is not None else "",
        }  # fmt: skip
    return said


def played(function: Any, given: Sequence[Stream]) -> Any:
    """What a reader sees, piece by piece."""
    said = {}
    for pieces, stops, include in given:
        one = function(list(stops), include)
        said[_name(pieces, stops)] = [one.feed(text) for text, _ in pieces] + [one.finish()]
    return said


def waiting(function: Any, given: Sequence[Stream]) -> Any:
    """How many characters have come and are not shown, after each piece."""
    said = {}
    for pieces, stops, include in given:
        one, fed, shown, held = function(list(stops), include), 0, 0, []
        for text, counts in pieces:
            fed, shown = fed + len(text), shown + len(one.feed(text) if counts else one.feed(text, False))
            held.append(fed - shown)
        said[_name(pieces, stops)] = held
    return said


def read_and_held(function: Any, given: Sequence[Stream]) -> Any:
    return {"read": read(function, given), "held back": waiting(function, given)}


def _name(pieces: Sequence[Piece], stops: Sequence[str]) -> str:
    """The stream in words. Bars show where it is cut; << stands where stops begin to count."""
    off = sum(not counts for _, counts in pieces)
    cut = ["|".join(text for text, _ in part) for part in (pieces[:off], pieces[off:])]
    return f"{' << '.join(cut) if off else cut[1]} with stops {', '.join(map(repr, stops)) or 'none'}"
