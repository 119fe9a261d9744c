"""Whether the tokens of an engine are those of the model: speed of wrong output is no result.

Engines round differently, so after some tokens their greedy answers part, and a comparison of tokens says nothing more.
A reference is asked instead: given the prompt and the answer so far, is the token written next its best, or so close to
it that rounding may decide? That holds for every token of a right answer, wherever it parted from others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minillm.attention.causal import NoCacheAttention
from minillm.attention.protocol import Batch, Row
from minillm.bench.workloads import Workload
from minillm.models.transformer import Transformer

# How far below the best logit a token may be, as a share of the largest magnitude in its row. bf16 has 8 bits, and its
# errors add up over the layers; a token of another request or another position is several tenths away.
GAP = {"float32": 1e-3, "bfloat16": 0.03, "float16": 0.01}


@torch.inference_mode()
def gaps(model: Transformer, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """[len(answer)] in fp32: by how much each token is below the reference's best, over the row's largest magnitude."""
    ids = [*prompt, *answer[:-1]]
    batch = Batch.build([Row(slot=0, start=0, num_new=len(ids))], ids, model.device)
    logits = model.logits(model.forward(batch, NoCacheAttention())[len(prompt) - 1 :]).float()
    chosen = logits.gather(1, torch.tensor([[t] for t in answer], device=logits.device))[:, 0]
    return (logits.amax(1) - chosen) / logits.abs().amax(1)


def worst(model: Transformer, work: Workload, answers: Sequence[Sequence[int]], sample: int = 4) -> tuple[float, float]:
    """(largest gap, share of tokens that are the reference's best) over `sample` requests: longest, shortest, between.

    `work.longest` must fit the model. A token that the vocabulary does not have is infinitely far away.
    """
    if not all(0 <= t < model.config.vocab_size for answer in answers for t in answer):
        return float("inf"), 0.0
    by_length = sorted(range(len(answers)), key=lambda i: len(work.prompts[i]) + len(answers[i]))
    spread = {by_length[round(k * (len(by_length) - 1) / max(1, sample - 1))] for k in range(sample)}
    found = torch.cat([gaps(model, work.prompts[i], answers[i]) for i in sorted(spread)])
    return found.max().item(), (found == 0).float().mean().item()
