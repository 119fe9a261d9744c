"""Shapes of well-known models, for rooflines and random-weight benchmarks. No weights are needed or fetched.

Numbers are those of each model's published `config.json`.
"""

from __future__ import annotations

from minillm.config import ModelConfig
from minillm.errors import MinillmError

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama3(
    hidden: int, inter: int, layers: int, heads: int, tied: bool = False, factor: float = 8.0, head_dim: int = 128
) -> ModelConfig:
    return ModelConfig(
        "llama",
        128256,
        hidden,
        inter,
        layers,
        heads,
        8,
        head_dim,
        131072,
        1e-5,
        500000.0,
        _LLAMA3_ROPE | {"factor": factor},
        tie_word_embeddings=tied,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )


def _qwen2(
    hidden: int, inter: int, layers: int, heads: int, kv: int, head_dim: int, vocab: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        "qwen2",
        vocab,
        hidden,
        inter,
        layers,
        heads,
        kv,
        head_dim,
        32768,
        1e-6,
        1e6,
        None,
        tie_word_embeddings=tied,
        attention_bias=True,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    )


def _qwen3(hidden: int, inter: int, layers: int, heads: int, kv: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        "qwen3",
        151936,
        hidden,
        inter,
        layers,
        heads,
        kv,
        128,
        40960,
        1e-6,
        1e6,
        None,
        tie_word_embeddings=tied,
        qk_norm=True,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    )


PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(bos_token_id=1, eos_token_ids=(2,)),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, tied=True, factor=32.0, head_dim=64),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 64, 151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 128, 152064, tied=False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, tied=False),
}


def preset(name: str) -> ModelConfig:
    """Shapes by name, for example `preset("llama-3.1-8b")`."""
    try:
        return PRESETS[name.lower()]
    except KeyError:
        raise MinillmError(f"no model shape {name!r}; known: {', '.join(PRESETS)}") from None
