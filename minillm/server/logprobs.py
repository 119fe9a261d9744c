"""Log-probabilities as OpenAI writes them, in its two forms, with the bytes that each token really is. Lesson 13.

A token of a byte-level vocabulary may be a piece of a character. Decoded by itself it is U+FFFD, and a client that
joins such texts can never show the character; its bytes it can join.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from minillm.models.detokenizer import BYTE_TOKEN
from minillm.request import TokenLogprob

FLOOR = -9999.0  # what OpenAI writes for a token that is very unlikely; JSON has no infinity
Entry = Mapping[int, TokenLogprob]


class Spelling(Protocol):
    """What is asked of a tokenizer."""

    backend: Any
    special_ids: frozenset[int]

    def id_to_token(self, token_id: int) -> str: ...


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies -> the byte (Radford et al., 2019, GPT-2).

    A byte that prints as Latin-1 stands for itself; the others, in their order, are written U+0100 and on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printing]
    return {chr(b): b for b in printing} | {chr(0x100 + i): b for i, b in enumerate(others)}


class TokenBytes:
    """Token id -> the bytes that it adds to the text. Remembers what was asked."""

    def __init__(self, tokenizer: Spelling):
        self._tokenizer = tokenizer
        decoder = repr(tokenizer.backend.decoder)
        self._byte_level = "ByteLevel(" in decoder
        self._space = "▁" if "▁" in decoder else None  # of SentencePiece vocabularies
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if self._byte_level:
            alphabet = byte_alphabet()
            return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()
        if BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:-1], 16)])
        return (token.replace(self._space, " ") if self._space else token).encode()


_TABLES: WeakKeyDictionary[Any, TokenBytes] = WeakKeyDictionary()


def token_bytes(tokenizer: Spelling) -> TokenBytes:
    """One table for each tokenizer, kept as long as it lives."""
    table = _TABLES.get(tokenizer)
    if table is None:
        table = _TABLES[tokenizer] = TokenBytes(tokenizer)
    return table


class ChatLogprobs:
    """The form of /v1/chat/completions: {"content": [{token, bytes, logprob, top_logprobs}, ...]}."""

    def __init__(self, tokenizer: Spelling, top: int):
        self._bytes, self._top = token_bytes(tokenizer), top

    def of(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> dict[str, Any]:
        return {"content": [self._token(t, e) for t, e in zip(token_ids, entries, strict=True)], "refusal": None}

    def _token(self, token_id: int, entry: Entry) -> dict[str, Any]:
        best = sorted((e for e in entry.values() if e.rank <= self._top), key=_rank)
        return {**self._one(entry[token_id]), "top_logprobs": [self._one(e) for e in best]}

    def _one(self, entry: TokenLogprob) -> dict[str, Any]:
        raw = self._bytes[entry.token_id]
        return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": max(FLOOR, entry.logprob)}


class CompletionLogprobs:
    """The form of /v1/completions: four lists with an item a token. One object for each choice, as it counts.

    hidden: the tokens that are left out of the text.

    tokens        each as text; one that is no whole characters as OpenAI writes it, "bytes:\\xe2\\x82"
    top_logprobs  text -> log-probability of the likeliest tokens, and of the chosen one if it is not among them
    text_offset   the character of the choice's text in which the token begins, counting from 0
    """

    def __init__(self, tokenizer: Spelling, hidden: frozenset[int] = frozenset()):
        self._bytes, self._hidden = token_bytes(tokenizer), hidden
        self._characters = 0  # begun so far

    def of(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> dict[str, Any]:
        """The next tokens."""
        return {
            "text_offset": [self._offset(t) for t in token_ids],
            "token_logprobs": [max(FLOOR, e[t].logprob) for t, e in zip(token_ids, entries, strict=True)],
            "tokens": [self._text(t) for t in token_ids],
            "top_logprobs": [self._best(t, e) for t, e in zip(token_ids, entries, strict=True)],
        }

    def _best(self, token_id: int, entry: Entry) -> dict[str, float]:
        found: dict[str, float] = {}
        for e in sorted(entry.values(), key=_rank):
            found.setdefault(self._text(e.token_id), max(FLOOR, e.logprob))
        found[self._text(token_id)] = max(FLOOR, entry[token_id].logprob)  # another may be spelled like it
        return found

    def _text(self, token_id: int) -> str:
        raw = self._bytes[token_id]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def _offset(self, token_id: int) -> int:
        raw = b"" if token_id in self._hidden else self._bytes[token_id]
        inside = bool(raw) and raw[0] & 0xC0 == 0x80 and self._characters > 0  # the first byte goes on a character
        begins = self._characters - inside
        self._characters += sum(b & 0xC0 != 0x80 for b in raw)
        return begins


def _rank(entry: TokenLogprob) -> int:
    return entry.rank
