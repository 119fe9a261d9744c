"""When does generation end? Stop strings over a stream of text, and the order of all reasons to finish. Lesson 03.

A stop string may begin in one token and end in another, and text that may be its beginning must not reach the reader
before the rest has decided. Knuth, Morris and Pratt (1977) need one counter for each stop string to know both: how many
of its characters the text ends with. At its length, the stop is complete; until then, that many are held back.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from minillm.request import Request


class StopStrings:
    """Text in, text that may be shown out, until a stop string is complete. O(1) amortised per character.

    The stop string that is *completed* first wins, wherever it began; of two completed by the same character, the
    longer, which began first. `matched` is it, or None. Nothing after it is released; it is itself released only
    with `include_stop`.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False):
        self.stop = tuple(stop)
        self.matched: str | None = None
        self._include = include_stop
        self._tables = [border_table(s) for s in self.stop]
        self._counts = [0] * len(self.stop)
        self._held = ""

    def feed(self, text: str, enabled: bool = True) -> str:
        """Take the next text; return what may be shown. While not `enabled`, stops that are completed do not count."""
        if self.matched is not None:
            return ""
        if not self.stop:
            return text
        for i, character in enumerate(text):
            done = self._advance(character)
            if done and enabled:
                self.matched = max(done, key=len)
                shown = self._held + text[: i + 1]
                self._held = ""
                return shown if self._include else shown[: len(shown) - len(self.matched)]
        shown = self._held + text
        keep = 0 if self._include else max(self._counts)
        self._held = shown[len(shown) - keep :]
        return shown[: len(shown) - keep]

    def completes(self, text: str) -> bool:
        """Would `feed(text)` complete a stop? Changes nothing."""
        trial = copy.copy(self)
        trial._counts = list(self._counts)
        trial.feed(text)
        return self.matched is None and trial.matched is not None

    def finish(self) -> str:
        """No more text: what was held back was not a stop after all."""
        shown, self._held = self._held, ""
        return shown

    def _advance(self, character: str) -> list[str]:
        """Move every counter over one character; returns the stops that it completes."""
        done = []
        for i, (stop, table) in enumerate(zip(self.stop, self._tables, strict=True)):
            n = self._counts[i]
            while n and stop[n] != character:
                n = table[n - 1]
            n += stop[n] == character
            if n == len(stop):
                done.append(stop)
                n = table[n - 1]  # go on with the longest beginning that is not the whole
            self._counts[i] = n
        return done


def border_table(s: str) -> list[int]:
    """table[i]: the length of the longest proper prefix of s[:i+1] that is also its suffix."""
    table = [0] * len(s)
    n = 0
    for i in range(1, len(s)):
        while n and s[i] != s[n]:
            n = table[n - 1]
        n += s[i] == s[n]
        table[i] = n
    return table


def check_finish(request: Request, stop_string: str | None = None) -> tuple[str, int | str | None] | None:
    """(finish_reason, stop_reason) if the request's last token ends it, else None. First reason wins:

    1. EOS, unless ignore_eos           "stop", None
    2. a token of stop_token_ids        "stop", the token id   (under ignore_eos too, as in vLLM)
    3. a stop string                    "stop", the string
    4. max_tokens or the context limit  "length", None         (the engine puts the smaller into request.max_tokens)

    The first min_tokens tokens are free of 1 to 3; the sampler bans 1 and 2 there, so this matters to other samplers.
    """
    p, n = request.params, len(request.output_token_ids)
    token = request.output_token_ids[-1]
    if n > p.min_tokens:
        if token in request.eos_token_ids and not p.ignore_eos:
            return "stop", None
        if token in p.stop_token_ids:
            return "stop", token
        if stop_string is not None:
            return "stop", stop_string
    return ("length", None) if n >= request.max_tokens else None
