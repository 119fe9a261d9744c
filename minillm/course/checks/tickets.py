"""References and mistakes of exercise 15 for a ticket: what is judged before one byte of somebody's KV is taken.

A ticket and what the decode engine expects are plain dicts, as they travel between engines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from minillm.course.tasks import Wrong

Ticket = dict[str, Any]

WHOSE = ("request_id", "attempt", "epoch")
FIXED = ("model", "dtype", "kv_dtype", "num_layers", "num_kv_heads", "head_dim")
LAID = ("block_size", "tp_size")
NAMES = (*WHOSE, "token_hash", "num_tokens", *FIXED, *LAID)

LAYOUT = {"model": "c3f1", "dtype": "bfloat16", "kv_dtype": "auto", "num_layers": 32, "num_kv_heads": 8,
          "head_dim": 128, "block_size": 16, "tp_size": 1}  # fmt: skip
TOKENS = [101, 7, 7, 4095, 128_001, 12, 90, 7, 3]


def token_hash(tokens: Sequence[int], width: int = 8, byteorder: Any = "little") -> str:
    return hashlib.sha256(b"".join(t.to_bytes(width, byteorder, signed=True) for t in tokens)).hexdigest()


def judge(ticket: Ticket, want: Ticket) -> tuple[str, str]:
    return judge_with(ticket, want)


def judge_with(
    ticket: Ticket, want: Ticket, *, whose: Sequence[str] = WHOSE, hashed: Any = token_hash, least: int = 1,
    leaves: int = 1, fixed: Sequence[str] = FIXED, laid: Sequence[str] = LAID, relay: str = "re-lay",
    stale: str = "drop", first_only: bool = False, any_epoch: bool = True, values: bool = True, tokens: bool = True,
    swapped: bool = False, multiples: bool = False, all_but_one: bool = False,
) -> tuple[str, str]:  # fmt: skip
    """The switches are the mistakes by name."""
    for name in whose:
        if name == "epoch" and want["epoch"] is None and any_epoch:
            continue
        if ticket[name] != want[name]:
            return stale, f"{name} is {ticket[name]}, expected {want[name]}"
    n, most = ticket["num_tokens"], len(want["tokens"]) - leaves
    if not (most if all_but_one else least) <= n <= most:
        return "refuse", f"num_tokens is {n}, and the prompt has {len(want['tokens'])}"
    if tokens and ticket["token_hash"] != hashed(want["tokens"][:n]):
        return "refuse", "token_hash is that of another prompt"
    theirs, ours = ticket["layout"], want["layout"]
    if swapped:
        theirs, ours = ours, theirs
    other = [name for name in fixed if theirs[name] != ours[name]]
    if other:
        words = [f"{n} is {theirs[n]} there and {ours[n]} here" if values else n for n in other]
        return "refuse", "; ".join(words[:1] if first_only else words)
    moved = [name for name in laid if theirs[name] != ours[name]]
    if multiples and (theirs["block_size"] % ours["block_size"] and ours["block_size"] % theirs["block_size"]):
        relay = "refuse"
    if moved:
        return relay, "; ".join(f"{n} is {theirs[n]} there and {ours[n]} here" for n in moved)
    return "load", ""


def want(epoch: str | None = "a7", tokens: Sequence[int] = TOKENS, **layout: Any) -> Ticket:
    return {"request_id": "r-1", "attempt": 2, "epoch": epoch, "tokens": list(tokens), "layout": LAYOUT | layout}


def ticket(layout: dict[str, Any] | None = None, **changed: Any) -> Ticket:
    """A ticket that fits `want()`, but for what is changed. Its hash is that of the tokens whose KV it brings."""
    made: Ticket = {"request_id": "r-1", "attempt": 2, "epoch": "a7", "num_tokens": 8} | changed
    return {"token_hash": token_hash(TOKENS[: made["num_tokens"]])} | made | {"layout": LAYOUT | (layout or {})}


def judged(function: Any, asked: Sequence[tuple[Ticket, Ticket]]) -> Any:
    """What is said of each: the verdict, and which names and values the words hold (not how they put it)."""
    said = {}
    for i, (one, expected) in enumerate(asked, 1):
        got = function(one, expected)
        if not isinstance(got, tuple | list) or len(got) != 2 or not all(isinstance(x, str) for x in got):
            raise Wrong(f"expected (verdict, words), got {got!r:.80}", "return two strings")
        verdict, words = got
        said[f"ticket {i}: {_about(one, expected)}"] = [verdict, *_named(words, one, expected)]
    return said


def _named(words: str, one: Ticket, expected: Ticket) -> list[str]:
    """The names that the words hold; of a layout's field with both values. Longest first: dtype is in kv_dtype."""
    found = []
    for name in sorted(NAMES, key=len, reverse=True):
        if name not in words:
            continue
        words_of = [w for w in words.split(";") if name in w]
        words = words.replace(name, "")
        if name in one["layout"] and one["layout"][name] != expected["layout"][name]:
            there, here = str(one["layout"][name]), str(expected["layout"][name])
            text = "".join(words_of)
            how = "with both values" if there in text and here in text else "without both values"
            if re.search(rf"\b{re.escape(here)} there\b|\b{re.escape(there)} here\b", text):
                how = "with what is there called here"
            found.append(f"{name}, {how}")
        else:
            found.append(name)
    return sorted(found)


def _about(one: Ticket, expected: Ticket) -> str:
    odd = [n for n in WHOSE if one[n] != expected[n]]
    odd += ["token_hash"] if one["token_hash"] != token_hash(expected["tokens"][: one["num_tokens"]]) else []
    odd += [f"num_tokens {one['num_tokens']} of {len(expected['tokens'])}"]
    return ", ".join([*odd, *[n for n in one["layout"] if one["layout"][n] != expected["layout"][n]]])


def asked(*pairs: tuple[Ticket, Ticket]) -> Callable[[], Any]:
    return lambda: (list(pairs),)
