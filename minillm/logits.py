"""What a request does to its logits before a token is drawn: pure functions, tensor in, new tensor out. Lesson 03.

The order is vLLM's: logit bias, ban before min_tokens, penalties, temperature, min-p, then top-k and top-p together.
Every filter keeps a *prefix* of the tokens sorted by logit, so a filter is a number: how many are kept. Equal logits
are ordered by token id, the lower one first; in bf16 they are common.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from minillm.request import Request

BIG = 1e30  # stands for +inf, which fp16 logits can hold: inf - inf would be NaN, and BIG / temperature is finite
TINY = 1e-30  # the smallest temperature or penalty that fp32 arithmetic is given
HEADS = (256, 4096)  # how many top tokens are sorted before the whole vocabulary is


def apply_logit_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Add a value to some tokens' logits. logits: [V]."""
    ids = torch.tensor(list(bias), device=logits.device)
    return logits.index_add(0, ids, torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device))


def ban(logits: Tensor, token_ids: Iterable[int]) -> Tensor:
    """Make tokens impossible. logits: [V]; ids outside it are ignored (a model may have no such token to ban)."""
    ids = [t for t in token_ids if t < logits.shape[-1]]
    return logits.index_fill(0, torch.tensor(ids, dtype=torch.int64, device=logits.device), -math.inf)


def apply_penalties(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Tensor:
    """Make tokens that were seen less likely (a repetition penalty below 1, or a negative one of the others: more).

    repetition: a positive logit is divided by it, a negative one multiplied, so that both move down (Keskar et al.,
    2019); it sees the prompt and the output. presence and frequency see the output only: subtracted once a token, and
    once an occurrence (OpenAI). logits: [V].
    """
    if repetition != 1.0 and (seen := sorted({*prompt, *output})):
        ids = torch.tensor(seen, device=logits.device)
        old = logits[ids]
        factor = max(repetition, TINY)
        logits = logits.index_copy(0, ids, torch.where(old > 0, old / factor, old * factor))
    if (presence or frequency) and output:
        counts = Counter(output)
        ids = torch.tensor(list(counts), device=logits.device)
        n = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(0, ids, -(presence + frequency * n))
    return logits


def is_edited(request: Request) -> bool:
    """Whether `edit` would change anything."""
    p = request.params
    penalties = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    return penalties or bool(p.logit_bias) or len(request.output_token_ids) < p.min_tokens


def edit(logits: Tensor, request: Request) -> Tensor:
    """The edits that can change which token is the best: bias, ban, penalties. logits: [V] fp32."""
    p = request.params
    if p.logit_bias:
        logits = apply_logit_bias(logits, p.logit_bias)
    if len(request.output_token_ids) < p.min_tokens:
        # Under ignore_eos the EOS token ends nothing, so there is nothing to ban.
        logits = ban(logits, {*p.stop_token_ids, *(() if p.ignore_eos else request.eos_token_ids)})
    penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    return apply_penalties(logits, request.prompt_token_ids, request.output_token_ids, *penalties).clamp(max=BIG)


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - max) / temperature; the best token is at 0 whatever the temperature. [B, V], [B] -> [B, V].

    Subtracting the maximum first changes no probability and keeps 1e-5 from overflowing.
    """
    return (logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=TINY).unsqueeze(-1)


def apply_min_p(scaled: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less than min_p times as likely as the best. [B, V] from `apply_temperature`, [B] -> [B, V].

    p / p_best = exp(scaled), so no softmax is needed.
    """
    return scaled.masked_fill(scaled < min_p.log().unsqueeze(-1), -math.inf)


def head(scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` best of each row, best first, lower id first among equals.

    scores: [B, V] -> values [B, width], token ids [B, width] int64, and trusted [B]: how many of those ids are certain.
    `topk` may return any of the tokens that tie for its last place, so the last group of equals is not trusted,
    unless the head is the whole vocabulary.
    """
    vocab = scores.shape[-1]
    if width >= vocab:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids, torch.full_like(ids[:, 0], vocab)
    values, ids = scores.topk(width, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order), (values > values[:, -1:]).sum(-1)


def best(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n best of each row with certain ids: values [B, n], ids [B, n]. n is capped at the vocabulary."""
    vocab = scores.shape[-1]
    n = min(n, vocab)
    for width in (*HEADS, vocab):
        values, ids, trusted = head(scores, width)
        if bool((trusted >= n).all()):
            break
    return values[:, :n], ids[:, :n]


def kept(values: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """How many of the sorted tokens top-k and then top-p keep. values: [B, K] scaled logits, best first; others [B].

    total is the sum of exp(scaled logit) over the whole row, for rows without a top-k; with one, top-p is measured
    on the k best, renormalised. A token stays while the mass *before* it is below top_p: the token that crosses the
    boundary stays, so at least one does.
    """
    weights = values.double().exp()
    in_k = torch.arange(values.shape[-1], device=values.device) < top_k.unsqueeze(-1)
    total = torch.where(top_k < total.new_tensor(math.inf), (weights * in_k).sum(-1), total)
    before = weights.cumsum(-1) - weights
    in_p = before < (top_p * total).unsqueeze(-1)
    return (in_k & in_p & (values > -math.inf)).sum(-1)


def survivors(
    scaled: Tensor, top_k: Sequence[int], top_p: Sequence[float]
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """What top-k and top-p leave of each row. scaled: [B, V]; top_k 0 and top_p 1.0 keep all.

    Yields groups (rows, values [b, K], ids [b, K] or [V]): -inf marks a dropped token; every row is in one group.

    Sorting 49,152 logits costs milliseconds on a CPU and the nucleus is nearly always among the best few hundred.
    So the best 256 are looked at first, and a row that needs more comes back with 4,096, then with everything. Which
    head a row takes follows from that row alone, and changes no result.
    """
    vocab = scaled.shape[-1]
    cut = [i for i in range(len(scaled)) if 0 < top_k[i] < vocab or top_p[i] < 1.0]
    if len(cut) < len(scaled):
        whole = sorted(set(range(len(scaled))) - set(cut))
        yield whole, scaled[whole], torch.arange(vocab, device=scaled.device)
    for width in (*HEADS, vocab):
        if not cut:
            return
        x = scaled[cut]
        values, ids, trusted = head(x, width)
        limits = [
            (top_k[i] if 0 < top_k[i] < vocab else math.inf, top_p[i] if top_p[i] < 1.0 else math.inf) for i in cut
        ]
        k, p = torch.tensor(limits, dtype=torch.float64, device=x.device).unbind(-1)
        n = kept(values, x.exp().sum(-1, dtype=torch.float64), k, p)
        done = (n <= trusted) & ((k <= values.shape[-1]) | k.isinf())
        dropped = torch.arange(values.shape[-1], device=x.device) >= n.unsqueeze(-1)
        values = values.masked_fill(dropped, -math.inf)
        flags = done.tolist()
        if any(flags):
            yield [i for i, ok in zip(cut, flags, strict=True) if ok], values[done], ids[done]
        cut = [i for i, ok in zip(cut, flags, strict=True) if not ok]
