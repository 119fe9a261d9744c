"""A decoder-only transformer of the Llama, Qwen2 and Qwen3 families, written plainly. Lesson 01 builds it.

Shapes in signatures: N tokens of a step (of one or many sequences, one after the other, no padding),
D hidden, H query heads, K key/value heads, d head_dim, I intermediate, V vocabulary.
Everything except attention treats each token alone, so tokens of different sequences simply share the
matrix products. How a token sees earlier ones is the attention backend's business.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention.protocol import AttentionBackend, Batch
from minillm.config import ModelConfig
from minillm.models.linear import Linear
from minillm.models.weights import LayerWeights, Weights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019). x [..., D], weight [D].

    The mean is taken in fp32 whatever the dtype: squares of bf16 values lose too much.
    """
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rope_table(
    config: ModelConfig, length: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * frequency, [length, d] each (RoPE; Su et al., 2021).

    Pair i of the d/2 pairs turns by `position * theta^(-2 i / d)`. Both halves of the row repeat the d/2 values,
    as the rotation of `apply_rope` wants them.
    """
    d = config.head_dim
    inv_freq = 1.0 / config.rope_theta ** (torch.arange(0, d, 2, dtype=torch.float32, device=device) / d)
    inv_freq = scale_rope(inv_freq, config.rope_scaling)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def scale_rope(inv_freq: Tensor, scaling: dict | None) -> Tensor:
    """Stretch RoPE for contexts longer than the trained one. inv_freq [d/2], in radians per token.

    "linear" slows every pair by `factor`. "llama3" (Llama 3.1 report) slows only the slow pairs, those whose
    wavelength exceeds the trained context over `low_freq_factor`, leaves the fast ones, and blends between.
    """
    if scaling is None:
        return inv_freq
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return inv_freq / factor
    trained, low, high = (
        scaling["original_max_position_embeddings"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
    )
    turns = trained * inv_freq / (2 * math.pi)  # full turns within the trained context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: fast pair, left alone; 0: slow pair, slowed
    return keep * inv_freq + (1.0 - keep) * inv_freq / factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + d/2]) by its angle. x [N, heads, d]; cos and sin [N, 1, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, 2020). [N, 2 I] -> [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Layer:
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, weights: LayerWeights):
        self.w = weights
        self.qkv = Linear(weights.qkv, weights.qkv_bias)
        self.o = Linear(weights.o, weights.o_bias)
        self.gate_up = Linear(weights.gate_up, weights.gate_up_bias)
        self.down = Linear(weights.down, weights.down_bias)


class Transformer:
    """The model. `forward` gives hidden states, `logits` the scores of the next token for chosen rows."""

    def __init__(self, config: ModelConfig, weights: Weights, max_len: int | None = None, pack: bool = False):
        """pack: reorder the weights for oneDNN on a CPU. The plain matrices in `weights` are then released."""
        self.config = config
        self.embed = weights.embed
        self.final_norm = weights.final_norm
        self.dtype, self.device = weights.embed.dtype, weights.embed.device
        self.layers = [Layer(w) for w in weights.layers]
        self.lm_head = Linear(weights.lm_head)
        self.max_len = max_len or config.max_position_embeddings
        self.cos, self.sin = rope_table(config, self.max_len, self.dtype, self.device)
        if pack:
            for layer in self.layers:
                for name in ("qkv", "o", "gate_up", "down"):
                    getattr(layer, name).pack()
                    setattr(layer.w, name, None)
            self.lm_head.pack()

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """Hidden states after the final norm. batch.token_ids and batch.positions [N] -> [N, D]."""
        plan = attention.plan(batch)
        x = F.embedding(batch.token_ids, self.embed)  # [N, D]
        cos = self.cos[batch.positions].unsqueeze(1)  # [N, 1, d]
        sin = self.sin[batch.positions].unsqueeze(1)
        for i, layer in enumerate(self.layers):
            x = self._attend(i, layer, x, cos, sin, attention, plan)
            h = rms_norm(x, layer.w.post_norm, self.config.rms_norm_eps)
            x = x + layer.down(swiglu(layer.gate_up(h)))
        return rms_norm(x, self.final_norm, self.config.rms_norm_eps)

    def _attend(
        self, i: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend, plan: object
    ) -> Tensor:
        c = self.config
        heads = layer.qkv(rms_norm(x, layer.w.input_norm, c.rms_norm_eps)).view(
            len(x), -1, c.head_dim
        )  # [N, H + 2 K, d]
        qk, v = heads.split((c.num_heads + c.num_kv_heads, c.num_kv_heads), dim=1)
        if layer.w.q_norm is not None and layer.w.k_norm is not None:
            q, k = qk.split((c.num_heads, c.num_kv_heads), dim=1)
            qk = torch.cat(
                (rms_norm(q, layer.w.q_norm, c.rms_norm_eps), rms_norm(k, layer.w.k_norm, c.rms_norm_eps)), dim=1
            )
        q, k = apply_rope(qk, cos, sin).split((c.num_heads, c.num_kv_heads), dim=1)  # one rotation for both
        attention.write(i, k, v, plan)
        out = attention.forward(i, q, plan)  # [N, H, d]
        return x + layer.o(out.reshape(len(x), -1))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, V], in the model's dtype. Only the rows that need a next token should come here."""
        return self.lm_head(hidden)
