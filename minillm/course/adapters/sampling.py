"""Exercise 03's draw, and with it the filters before it, as the engine's sampler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.course.answers import Answers
from minillm.errors import MinillmError
from minillm.logits import BIG, edit
from minillm.request import Request, TokenLogprob
from minillm.rng import mix64
from minillm.sampler import NO_TOKEN, distribution, greedy, logprobs

FILTERS = ("03.2", "03.3", "03.4", "03.5")
NO_PENALTY: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def sampler(answers: Answers) -> DrawSampler:
    """What `parts["sampler"]` takes. With the four filters written, the distribution is the learner's too."""
    draw = answers.take("03.6", 4)
    if not answers.has(*FILTERS):
        return DrawSampler(draw)
    return DrawSampler(draw, Filters(*(answers.take(t, n) for t, n in zip(FILTERS, (2, 4, 3, 6), strict=True))))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else."""
    return (mix64(mix64(seed) + position) >> 11) / 2**53


class Filters:
    """What the exercise leaves to the engine is done before: bias, and the ban on ending before min_tokens."""

    def __init__(self, tempered: Any, nucleus: Any, min_p: Any, penalties: Any):
        self.tempered, self.nucleus, self.min_p, self.penalties = tempered, nucleus, min_p, penalties

    def __call__(self, logits: Tensor, request: Request) -> Tensor:
        """logits [V] -> probabilities [V]."""
        p, bare = request.params, copy.copy(request)
        bare.params = p.replace(**NO_PENALTY)
        x = edit(logits.to(torch.float32, copy=True).clamp_(max=BIG), bare)
        seen = list(request.prompt_token_ids), list(request.output_token_ids)
        penalised = self.penalties(x, *seen, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        x = like(x, "penalties", penalised)
        if p.greedy:
            return like(x, "tempered", self.tempered(x, 0.0))
        x = like(x, "min_p", self.min_p(x, p.temperature, p.min_p))
        return like(x, "nucleus", self.nucleus(x, p.temperature, p.top_k, p.top_p))


class DrawSampler:
    """`filters` gives a row's probabilities; None is the engine's own."""

    def __init__(self, draw: Callable[..., Any], filters: Filters | None = None):
        self.draw, self.filters = draw, filters

    def sample(
        self, logits: Tensor, requests: Sequence[Request]
    ) -> tuple[list[int], list[dict[int, TokenLogprob] | None]]:
        """As `minillm.sampler.Sampler.sample`: a row that is no distribution gives NO_TOKEN."""
        tokens = greedy(logits)
        rows = [i for i, token in enumerate(tokens) if token != NO_TOKEN]
        if rows:
            theirs = [requests[i] for i in rows]
            if self.filters is None:
                probabilities = distribution(logits[rows], theirs).float()
            else:
                probabilities = torch.stack([self.filters(logits[i], r) for i, r in zip(rows, theirs, strict=True)])
            drawn = self.draw(probabilities, [r.seed for r in theirs], [r.num_tokens for r in theirs], uniform)
            if not isinstance(drawn, list) or len(drawn) != len(rows):
                raise MinillmError(f"parts: draw must return a list of {len(rows)} token ids, got {drawn!r:.80}")
            for i, token in zip(rows, drawn, strict=True):
                tokens[i] = token
        return tokens, logprobs(logits, tokens, requests)


def like(x: Tensor, what: str, given: Any) -> Tensor:
    if not isinstance(given, Tensor) or given.shape != x.shape:
        shape = list(given.shape) if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise MinillmError(f"parts: {what} must return a tensor of {list(x.shape)}, got {shape}")
    return given.to(torch.float32)
