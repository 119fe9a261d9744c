"""When is a token text? The incremental detokenizer: only text that no later token can change. Lesson 03 builds this.

A token is not a piece of text. It is bytes, and a character may need several tokens, so decoding token by token
shows broken characters, and decoding everything at every step costs O(T^2). What works is a window: the last few
tokens, decoded together, minus what was already sent. Two rules say how much of its text is final.

1. Byte-level vocabularies (GPT-2, Llama 3, Qwen): `decode` shows an unfinished character at the end as one U+FFFD.
   All that stands before it is final. A real U+FFFD at the end looks the same and waits for the next token too.
2. Byte-fallback vocabularies (Llama 2, Mistral, Gemma): a rare character is spelled in tokens <0xE4>, <0xBD>, ... and
   `decode` takes a whole run of them at once: one bad byte turns *all* of the run into U+FFFD, also characters that
   were complete before. So a run is final when a token that is no byte ends it.

The window may drop old tokens because the end of a text depends on little: on four bytes at most in rule 1, as no
UTF-8 character is longer; on nothing before the last token that is no byte in rule 2; and decoders that strip a
leading space strip it from what was already sent. `tokenizers.decoders.DecodeStream` is the library's version; it
raises on a run that turns bad, holds everything while the text ends in U+FFFD, and cannot release what it holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
WINDOW = 8  # visible tokens kept as context; at least four, and a token is at least one byte
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TextCodec(Protocol):
    """What a detokenizer needs of a tokenizer."""

    special_ids: frozenset[int]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, token_id: int) -> str: ...


class IncrementalDetokenizer:
    """Token ids in, final text out; O(1) amortised per token.

    All that `append` and `finish` return, concatenated, is exactly `decode(prompt + output)` after its longest common
    prefix with `decode(prompt)`: the text that the output added. When the prompt ends inside a character, that
    character belongs to the output if the output completes it.
    """

    def __init__(self, tokenizer: TextCodec, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        tail: list[int] = []  # of the prompt, last token first
        run = 0  # byte tokens that the prompt ends with
        for token in filter(self._visible, reversed(prompt_token_ids)):
            tail.append(token)
            if self._is_byte(token):
                run += run == len(tail) - 1
            elif len(tail) >= WINDOW:
                break
        self._window = tail[::-1]
        self._in_run = run > 0
        text = self._decode(self._window)
        self._sent = len(self._decode(self._window[:-run])) if run else _final_length(text)
        self._owed = text[self._sent :]  # the prompt's own, though not final: never sent again

    def append(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens; return the text that became final."""
        return "".join([self._append(token) for token in token_ids])

    def finish(self) -> str:
        """No more tokens: release what was held back. An unfinished character is shown as U+FFFD, as `decode` does."""
        text = self._decode(self._window)
        return self._send(text, len(text))

    def peek(self) -> str:
        """Text held back although it is complete: a run of bytes that is valid so far. It is final if nothing follows.

        A stop string must be found here, or generation would run on to the end of the run.
        """
        if not self._in_run:
            return ""
        held = self._decode(self._window)[self._sent :].rstrip(REPLACEMENT)
        return held[_common_length(held, self._owed) :]

    def _append(self, token: int) -> str:
        if not self._visible(token):
            return ""
        self._window.append(token)
        self._in_run = self._is_byte(token)
        if self._in_run:
            return ""
        text = self._decode(self._window)
        final = _final_length(text)
        delta = self._send(text, final)
        if len(self._window) > 2 * WINDOW:
            del self._window[:-WINDOW]
            self._sent = len(self._decode(self._window)) - (len(text) - final)
        return delta

    def _send(self, text: str, end: int) -> str:
        """text[sent:end], without what the prompt had shown of it."""
        delta, self._sent = text[self._sent : end], end
        if self._owed:
            same = _common_length(delta, self._owed)
            # Once they differ, all that follows is the output's.
            self._owed = self._owed[same:] if same == len(delta) else ""
            delta = delta[same:]
        return delta

    def _visible(self, token: int) -> bool:
        """Skipped tokens, and ids that have no token (padded vocabularies), never reach the decoder."""
        return token not in self._hidden and bool(self._tokenizer.id_to_token(token))

    def _is_byte(self, token: int) -> bool:
        """Is this a byte-fallback token? In a byte-level vocabulary "<0x0A>" would be six ordinary characters."""
        name = self._tokenizer.id_to_token(token)
        return BYTE_TOKEN.fullmatch(name) is not None and self._decode([token]) != name

    def _decode(self, tokens: list[int]) -> str:
        # Hidden tokens are gone already. False also keeps specials visible when they were asked for.
        return self._tokenizer.decode(tokens, False)


def _final_length(text: str) -> int:
    return len(text) - text.endswith(REPLACEMENT)


def _common_length(a: str, b: str) -> int:
    """How many characters a and b begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
