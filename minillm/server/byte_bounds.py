"""What the bytes of a text prove about its tokens, before anybody tokenises it. Lesson 13.

If every token stands for at most L bytes and no byte is lost on the way, B bytes are at least B / L tokens. Whether
that holds is read off the tokenizer's own description (tokenizer.json): a normalizer may shorten a text, a
pre-tokenizer may drop parts of it, an unknown-token may swallow any number of bytes. What is not known to keep its
bytes proves nothing, and the answer is None.

Even SmolLM2's byte-level vocabulary has no token for the byte 04 and drops it, so a megabyte of it is no token at all.
`ByteBound.count` leaves such bytes out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minillm.server.logprobs import byte_alphabet

SPACE = "\u2581"  # how byte-fallback vocabularies (Llama 2, Mistral) write a space
NFC_SHRINKS = 4  # times at most; the worst is 3.5, seven bytes of Greek with accents in two
KEEPING = ("ByteLevel", "Digits", "Metaspace")  # pre-tokenizers that only cut, or replace a byte by a character


@dataclass(frozen=True)
class ByteBound:
    """longest: bytes of text that one token stands for at most. dropped: bytes that no token stands for."""

    longest: int
    dropped: bytes = b""

    def count(self, text: str) -> int:
        """The bytes of a text that become tokens: `Ask.prompt_bytes`. Half a surrogate pair counts too."""
        return len(text.encode("utf-8", "surrogatepass").translate(None, self.dropped))


def byte_bound(backend: Any) -> ByteBound | None:
    """What this `tokenizers.Tokenizer` proves, or None."""
    d = json.loads(backend.to_str())
    model, added = d.get("model") or {}, d.get("added_tokens") or []
    shrinks = _normalizer(d.get("normalizer"))
    if d.get("truncation") or shrinks is None or not _keeps(d.get("pre_tokenizer")):
        return None
    if any(t.get("lstrip") or t.get("rstrip") for t in added):  # they swallow spaces, any number of them
        return None
    vocab = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocab, Mapping):
        return None
    names = [t["content"] for t in added]
    if "ByteLevel" in _types(d.get("pre_tokenizer")):  # a token's name has one character a byte
        dropped = bytes(sorted(b for c, b in byte_alphabet().items() if c not in vocab))
        longest = max(map(len, vocab), default=0)
    elif model.get("byte_fallback") and all(f"<0x{b:02X}>" in vocab for b in range(256)):
        dropped, longest = b"", max(_fallback_bytes(v) for v in vocab)
    else:
        return None
    if dropped and shrinks > 1:  # which bytes will be left after normalizing?
        return None
    return ByteBound(shrinks * max([longest, *(len(name.encode()) for name in names)]), dropped)


def _fallback_bytes(name: str) -> int:
    return 1 if re.fullmatch(r"<0x[0-9A-F]{2}>", name) else len(name.replace(SPACE, " ").encode())


def _normalizer(d: Mapping[str, Any] | None) -> int | None:
    """How many times shorter it can make a text, in bytes; None if that is not known."""
    if d is None:
        return 1
    if d["type"] == "Sequence":
        each = [_normalizer(n) for n in d["normalizers"]]
        product = 1
        for e in each:
            if e is None:
                return None
            product *= e
        return product
    if d["type"] == "NFC":
        return NFC_SHRINKS
    replaces = d["type"] == "Replace" and d.get("pattern") == {"String": " "} and d.get("content") == SPACE
    return 1 if replaces or d["type"] == "Prepend" else None


def _keeps(d: Mapping[str, Any] | None) -> bool:
    if d is None:
        return True
    if d["type"] == "Sequence":
        return all(_keeps(p) for p in d["pretokenizers"])
    return d["type"] in KEEPING or (d["type"] == "Split" and d.get("behavior") != "Removed")


def _types(d: Mapping[str, Any] | None) -> list[str]:
    if d is None:
        return []
    return [t for p in d["pretokenizers"] for t in _types(p)] if d["type"] == "Sequence" else [d["type"]]
