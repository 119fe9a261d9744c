"""Logits in, tokens out: a pure function of logits, parameters and (seed, position). Lesson 03 builds this.

Nothing else goes in: no generator state, no other row, no batch order. A request that is preempted, moved to another
batch or computed on another rank draws the same tokens (rule 3 of docs/source.md). `rng.py` holds the noise,
`logits.py` the filters; this file puts them in order and reports log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minillm import rng
from minillm.errors import MinillmError, RequestError
from minillm.logits import BIG, apply_min_p, apply_temperature, best, edit, is_edited, survivors
from minillm.request import Request, SamplingParams, TokenLogprob

NO_TOKEN = -1  # in place of a token, where a row is no distribution: NaN, or every token at -inf
LOGPROB_FLOOR = -9999.0  # vLLM's; JSON has no -inf


class Sampler:
    """The sampler an engine calls once a step. Stateless: one object serves any number of engines."""

    def sample(
        self, logits: Tensor, requests: Sequence[Request]
    ) -> tuple[list[int], list[dict[int, TokenLogprob] | None]]:
        """Draw the next token of each request.

        logits    [B, V], any float dtype, not changed; row i belongs to requests[i], whose `num_tokens` is the
                  position of the token that is drawn
        returns   B token ids, and per request None or {token id: TokenLogprob}: the drawn token first, then the
                  `params.logprobs` most likely ones. They are natural logs of the model's own distribution, before
                  bias, penalties and temperature, as in vLLM, and always finite.

        A row that is no distribution gives NO_TOKEN, so that it cannot take the batch down with it; the caller fails
        that request alone with `no_token_error`.
        """
        if logits.dim() != 2 or len(logits) != len(requests):
            raise MinillmError(
                f"logits must be [{len(requests)}, vocabulary], a row a request; got {list(logits.shape)}"
            )
        tokens = greedy(logits)
        todo = [i for i, r in enumerate(requests) if tokens[i] != NO_TOKEN and (not r.params.greedy or is_edited(r))]
        if todo:
            theirs = [requests[i] for i in todo]
            for i, token in zip(todo, draw(edited(logits[todo], theirs), theirs), strict=True):
                tokens[i] = token
        return tokens, logprobs(logits, tokens, requests)


def greedy(logits: Tensor) -> list[int]:
    """The best token of each row [B, V], the lowest id among equals; NO_TOKEN where it is NaN or -inf.

    `max` returns NaN for a row that holds one, so its two results settle token and validity in one pass,
    without an fp32 copy.
    """
    values, ids = logits.max(dim=-1)
    return [i if v > -math.inf else NO_TOKEN for v, i in zip(values.tolist(), ids.tolist(), strict=True)]


def edited(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """An fp32 copy [B, V] with every request's bias, ban and penalties applied, and +inf replaced by BIG."""
    x = logits.to(torch.float32, copy=True).clamp_(max=BIG)
    for row, request in enumerate(requests):
        if is_edited(request):
            x[row] = edit(x[row], request)
    return x


def draw(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """One token a row from edited logits [B, V] fp32: the best one, or argmax(scaled logit + noise) over survivors."""
    tokens = greedy(logits)
    rows = [i for i, r in enumerate(requests) if not r.params.greedy and tokens[i] != NO_TOKEN]
    if rows:
        theirs = [requests[i] for i in rows]
        keys = rng.keys(((r.seed, r.num_tokens) for r in theirs), logits.device)
        x = scaled(logits[rows], theirs)
        for group, values, ids in survivors(x, [r.params.top_k for r in theirs], [r.params.top_p for r in theirs]):
            winner = (values + rng.gumbel(keys[group], ids)).argmax(-1, keepdim=True)
            for i, token in zip(group, ids.expand_as(values).gather(-1, winner).flatten().tolist(), strict=True):
                tokens[rows[i]] = token
    return tokens


def scaled(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Temperature and min-p of random requests. [B, V] -> [B, V]; the best token is at 0."""
    to = lambda numbers: torch.tensor(numbers, dtype=torch.float32, device=logits.device)
    x = apply_temperature(logits, to([r.params.temperature for r in requests]))
    if any(r.params.min_p > 0.0 for r in requests):
        x = apply_min_p(x, to([r.params.min_p for r in requests]))
    return x


def distribution(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """The exact probabilities that `Sampler.sample` draws from: [B, V] fp64, rows sum to 1 (greedy: one 1).

    Raises MinillmError for a row that is no distribution. Lesson 03 plots it, tests count draws against it.
    """
    x = edited(logits, requests)
    probabilities = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    random = []
    for i, (token, request) in enumerate(zip(greedy(x), requests, strict=True)):
        if token == NO_TOKEN:
            raise no_token_error(logits[i], request)
        if request.params.greedy:
            probabilities[i, token] = 1.0
        else:
            random.append(i)
    theirs = [requests[i] for i in random]
    if theirs:
        x = scaled(x[random], theirs)
        for group, values, ids in survivors(x, [r.params.top_k for r in theirs], [r.params.top_p for r in theirs]):
            rows = torch.tensor([random[i] for i in group], device=x.device).unsqueeze(-1)
            probabilities[rows, ids.expand_as(values)] = values.double().softmax(-1)
    return probabilities


def logprobs(
    logits: Tensor, tokens: Sequence[int], requests: Sequence[Request]
) -> list[dict[int, TokenLogprob] | None]:
    """Log-probabilities of the drawn token and of the most likely ones, for the requests that asked.

    rank counts from 1 in the order of `best`: tokens with a larger logit, and equal ones with a lower id, come before.
    """
    result: list[dict[int, TokenLogprob] | None] = [None] * len(requests)
    rows = [i for i, r in enumerate(requests) if r.params.logprobs is not None and tokens[i] != NO_TOKEN]
    if not rows:
        return result
    x = logits[rows].float().clamp(max=BIG)
    logp = x.log_softmax(-1)
    chosen = torch.tensor([tokens[i] for i in rows], device=x.device).unsqueeze(-1)
    own = x.gather(-1, chosen)
    ids = torch.arange(x.shape[-1], device=x.device)
    ranks = ((x > own) | ((x == own) & (ids <= chosen))).sum(-1).tolist()
    own_logp = logp.gather(-1, chosen).flatten().tolist()
    _, top = best(x, max(requests[i].params.logprobs or 0 for i in rows))
    top_logp = logp.gather(-1, top).tolist()
    for row, (i, top_ids) in enumerate(zip(rows, top.tolist(), strict=True)):
        token, count = tokens[i], requests[i].params.logprobs or 0
        found = {token: TokenLogprob(token, max(own_logp[row], LOGPROB_FLOOR), ranks[row])}
        for rank, (other, value) in enumerate(zip(top_ids[:count], top_logp[row], strict=False), start=1):
            found.setdefault(other, TokenLogprob(other, max(value, LOGPROB_FLOOR), rank))
        result[i] = found
    return result


def no_token_error(logits: Tensor, request: Request) -> MinillmError:
    """Why this row [V] gave NO_TOKEN, in words for the caller of the request."""
    where = f"request {request.request_id}: no token can be drawn at position {request.num_tokens}"
    nan = int(logits.isnan().sum())
    if nan:
        return MinillmError(
            f"{where}: {nan} of {logits.numel()} logits are NaN; the weights are damaged, or the dtype overflows "
            "(try dtype='float32')"
        )
    if bool((logits == -math.inf).all()):
        return MinillmError(f"{where}: every logit is -inf; the weights are damaged, or the dtype overflows")
    return MinillmError(f"{where}: min_tokens bans every token that the model allows; lower min_tokens")


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model does not have. Raises RequestError naming the field."""
    for field, ids in (("logit_bias", params.logit_bias or {}), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(field, f"token id {token} is outside the vocabulary (0 to {vocab_size - 1})")
