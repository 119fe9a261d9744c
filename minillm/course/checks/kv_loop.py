"""Reference and typical mistakes of exercise 02 for the cached loop, and a model with a cache to drive it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minillm.course.candidate import CandidateError
from minillm.course.checks.tiny import TinyModel
from minillm.course.tasks import Wrong

# 02.4 the cached loop

MODEL = TinyModel()
PROMPT = [12, 32, 26, 31, 22, 26, 22]  # goes on with eight different tokens

CHUNK_RESET = "position reset: the second chunk starts where the first one ended, not at 0"
ONE_TOO_FAR = "start off by one: it is the number of tokens fed so far; those of this call do not count"


def drive(
    function: Any, prompt: list[int], max_new_tokens: int, eos_id: int | None, chunk: int, tokens_only: bool = False
) -> Any:
    """Run the loop on a model with a cache, and note what each call was fed."""
    cached: list[int] = []
    calls: list[list[int]] = []
    holes: list[str] = []

    def model(ids: Any, start: Any) -> Tensor:
        ids = ids.reshape(-1).tolist() if isinstance(ids, Tensor) else list(ids)
        if not ids or not all(type(i) is int and 0 <= i < MODEL.vocab for i in ids):
            raise TypeError(f"model takes a non-empty list of token ids from 0 to {MODEL.vocab - 1}, got {ids!r}")
        if not 0 <= start <= len(cached):
            holes.append(f"start={start} leaves a hole: the cache holds {len(cached)} tokens")
            raise ValueError(holes[0])
        calls.append([len(ids), start])
        if len(calls) > 50:
            raise RuntimeError("the model was called more than 50 times; when does the loop end?")
        cached[start:] = ids
        return MODEL(cached)[start:]

    try:
        tokens = function(model, prompt, max_new_tokens, eos_id, chunk)
    except CandidateError:
        if not holes:
            raise
        again = any(start == 0 for _, start in calls[1:])
        raise Wrong(holes[0], CHUNK_RESET if again else ONE_TOO_FAR) from None
    if isinstance(tokens, list) and any(type(t) is not int for t in tokens):
        raise Wrong("the tokens are not plain ints", "`int(...)` or `.item()` takes the number out of a tensor")
    if tokens_only:
        return tokens
    fed = sum(n for n, _ in calls)
    return {"tokens": tokens, "tokens fed in all": fed, "[tokens fed, start] of each call": calls}


def text_of(function: Any, prompt: list[int], max_new_tokens: int, eos_id: int | None, chunk: int) -> Any:
    return drive(function, prompt, max_new_tokens, eos_id, chunk, tokens_only=True)


def generate(model: Any, prompt: list[int], max_new_tokens: int, eos_id: int | None, chunk: int) -> list[int]:
    return generate_with(model, prompt, max_new_tokens, eos_id, chunk)


def generate_with(
    model: Any, prompt: list[int], limit: int, eos: int | None, chunk: int, *, naive: bool = False, shift: int = 0,
    reset: bool = False, whole_prompt: bool = False, row: int = -1, keep_eos: bool = True,
    feed_last: bool = False, one_by_one: bool = False,
) -> list[int]:  # fmt: skip
    size = len(prompt) if whole_prompt else 1 if one_by_one else chunk
    for at in range(0, len(prompt), size):
        logits = model(prompt[at : at + size], at)
    new: list[int] = []
    while True:
        token = int(logits[row].argmax())
        if token != eos or keep_eos:
            new.append(token)
        stop = token == eos or len(new) >= limit
        if stop and not feed_last:
            return new
        start = 0 if reset else len(prompt) + len(new) - 1 + shift
        logits = model(prompt + new, 0) if naive else model([token], start)
        if stop:
            return new


def _free() -> list[int]:
    cached: list[int] = []

    def model(ids: list[int], start: int) -> Tensor:
        cached[start:] = ids
        return MODEL(cached)[start:]

    return generate_with(model, PROMPT, 8, None, 99)


FREE = _free()
STOP = next(t for t in FREE if FREE.index(t) >= 2)  # a token that first comes up third or later
