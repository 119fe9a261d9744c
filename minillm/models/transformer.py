"""A decoder-only transformer of the Llama, Qwen2 and Qwen3 families, written plainly. Lesson 01 builds it.

Shapes in signatures: N tokens of a step (of one or many sequences, one after the other, no padding),
D hidden, H query heads, K key/value heads, d head_dim, I intermediate, V vocabulary.
Everything except attention treats each token alone, so tokens of different sequences simply share the
matrix products. How a token sees earlier ones is the attention backend's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention.protocol import AttentionBackend, Batch
from minillm.config import ModelConfig
from minillm.models.cpu_ops import CpuOps
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


class Ops(Protocol):
    """The operators between two matrix products, which a kernel may fuse. `kernels/` has them in Triton (lesson 04)."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., D] -> [..., D]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum), each [N, D]."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """[N, 2 I] -> [N, I]."""

    # Optional, both or none: without them the rotation is the plain one.

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The step's cosines and sines as `rope` wants them, [N, 1, d] each. Called once a step."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [N, heads, d] by what `angles` gave. Not called for a backend that has `rope_write`."""


class TorchOps:
    """Plain torch, one operator after the other."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return rms_norm(total, weight, eps), total

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos, sin

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rope(x, cos, sin)


PLAIN = TorchOps()


class Layer:
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, weights: LayerWeights):
        self.w = weights
        self.qkv = Linear(weights.qkv, weights.qkv_bias)
        self.o = Linear(weights.o, weights.o_bias)
        self.gate_up = Linear(weights.gate_up, weights.gate_up_bias)
        self.down = Linear(weights.down, weights.down_bias)


class Embedding:
    """Row i of the table is token i's vector. ids [N] -> [N, D]."""

    def __init__(self, table: Tensor):
        self.table = table  # [V, D]

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.table)


class Transformer:
    """The model. `forward` gives hidden states, `logits` the scores of the next token for chosen rows.

    Of a pipeline (lesson 14) it is one stage: `first` embeds the tokens, others are given hidden states; `last` applies
    the final norm, others give what the next stage is given.
    """

    def __init__(self, config: ModelConfig, weights: Weights, max_len: int | None = None, pack: bool = False):
        """pack: on a CPU, reorder the weights for oneDNN, letting the plain ones go, and use `CpuOps`."""
        self.config = config
        self.embed = weights.embed
        self.embedding: Callable[[Tensor], Tensor] = Embedding(weights.embed)
        self.first = self.last = True
        self.final_norm = weights.final_norm
        self.dtype, self.device = weights.embed.dtype, weights.embed.device
        self.layers = [Layer(w) for w in weights.layers]
        self.lm_head = Linear(weights.lm_head)
        self.max_len = max_len or config.max_position_embeddings
        self.cos, self.sin = rope_table(config, self.max_len, self.dtype, self.device)
        self.ops: Ops = CpuOps() if pack and self.device.type == "cpu" else TorchOps()
        if pack:
            for layer in self.layers:
                for name in ("qkv", "o", "gate_up", "down"):
                    getattr(layer, name).pack()
                    setattr(layer.w, name, None)
            self.lm_head.pack()

    @property
    def _rotation(self) -> Ops:
        return self.ops if hasattr(self.ops, "rope") else PLAIN

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """Hidden states after the final norm. batch.token_ids and batch.positions [N] -> [N, D]."""
        return self.compute(batch.token_ids, batch.positions, attention, attention.plan(batch))

    @torch.inference_mode()
    def compute(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend, plan: object,
        hidden: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`forward` for a plan that is already made: device work only, so that a CUDA graph can hold it (lesson 07).

        Each residual addition is done together with the norm behind it: one pass over memory where it is fused.
        hidden [N, D]: from the stage before, for a stage that is not the first of a pipeline.
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        x = self.embedding(token_ids) if hidden is None else hidden  # [N, D]
        cos = sin = None
        if not hasattr(attention, "rope_write"):  # a backend that fuses the rotation looks its angles up itself
            cos, sin = (table[positions].unsqueeze(1) for table in (self.cos, self.sin))  # [N, 1, d]
            cos, sin = self._rotation.angles(cos, sin)
        h = ops.rms_norm(x, self.layers[0].w.input_norm, eps)
        after = [layer.w.input_norm for layer in self.layers[1:]] + ([self.final_norm] if self.last else [])
        for i, layer in enumerate(self.layers):
            a = self._attend(i, layer, h, positions, cos, sin, attention, plan)
            h, x = ops.add_rms_norm(a, x, layer.w.post_norm, eps)
            m = layer.down(ops.swiglu(layer.gate_up(h)))
            if i == len(after):  # the next stage begins with the norm
                return x + m
            h, x = ops.add_rms_norm(m, x, after[i], eps)
        return h

    def _attend(
        self, i: int, layer: Layer, h: Tensor, positions: Tensor, cos: Tensor | None, sin: Tensor | None,
        attention: Any, plan: object,
    ) -> Tensor:  # fmt: skip
        c = self.config
        heads = layer.qkv(h).view(len(h), -1, c.head_dim)  # [N, H + 2 K, d]
        qk, v = heads.split((c.num_heads + c.num_kv_heads, c.num_kv_heads), dim=1)
        if layer.w.q_norm is not None and layer.w.k_norm is not None:
            q, k = qk.split((c.num_heads, c.num_kv_heads), dim=1)
            norm = self.ops.rms_norm
            qk = torch.cat((norm(q, layer.w.q_norm, c.rms_norm_eps), norm(k, layer.w.k_norm, c.rms_norm_eps)), dim=1)
        if cos is None or sin is None:
            fresh = heads if layer.w.q_norm is None else torch.cat((qk, v), dim=1)
            q = attention.rope_write(i, fresh, self.cos, self.sin, positions, plan)
        else:
            turned = self._rotation.rope(qk, cos, sin)  # one rotation for both
            q, k = turned.split((c.num_heads, c.num_kv_heads), dim=1)
            attention.write(i, k, v, plan)
        out = attention.forward(i, q, plan)  # [N, H, d]
        return layer.o(out.reshape(len(h), -1))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, V], in the model's dtype. Only the rows that need a next token should come here."""
        return self.lm_head(hidden)
