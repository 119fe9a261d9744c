"""Other engines on the same work: same folder, dtype, threads and token ids. Only the transformers library so far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minillm.errors import MinillmError

NAMES = ("transformers",)


class TransformersPeer:
    """`transformers.generate` as a user would call it: SDPA attention, its default (dynamic) cache, greedy.

    A batch is padded on the left and runs until its longest member is done; each request keeps its own tokens.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str):
        try:
            from transformers import AutoModelForCausalLM, GenerationConfig
        except ImportError:
            raise MinillmError("the peer needs the transformers library: pip install transformers") from None
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(device).eval()
        self.config = GenerationConfig
        self.device = device

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[list[int]]:
        """Exactly `new_tokens[i]` greedy tokens after prompt i."""
        width, most = max(map(len, prompts)), max(new_tokens)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        how = self.config(
            do_sample=False, max_new_tokens=most, min_new_tokens=most, eos_token_id=None, pad_token_id=0, use_cache=True
        )  # fmt: skip
        out = self.model.generate(ids, attention_mask=mask, generation_config=how)
        return [out[i, width : width + n].tolist() for i, n in enumerate(new_tokens)]

    @torch.inference_mode()
    def last_logits(self, prompt: Sequence[int]) -> torch.Tensor:
        """[V] in fp32: the scores of the token after the prompt."""
        return self.model(torch.tensor([list(prompt)], device=self.device)).logits[0, -1].float()


def make(name: str, folder: Path, dtype: torch.dtype, device: str) -> TransformersPeer:
    if name not in NAMES:
        raise MinillmError(f"peer {name!r} is not known; use {', '.join(NAMES)}")
    return TransformersPeer(folder, dtype, device)
