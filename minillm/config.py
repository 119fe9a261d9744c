"""`ModelConfig`: what the arithmetic of a decoder needs, validated once, at the door.

Read from a Hugging Face `config.json` of the Llama, Qwen2/2.5 or Qwen3 dense families. What a user may choose about
how it runs is `EngineConfig`, in engine_config.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError

DTYPES = ("float32", "bfloat16", "float16")
MODEL_TYPES = ("llama", "qwen2", "qwen3")
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 10_000  # far beyond any model: a larger number in a config is a mistake
MAX_REAL = 1e30  # of constants that enter fp32 arithmetic
_DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def dtype_name(dtype: Any) -> str:
    """`"bf16"`, `"bfloat16"` or `torch.bfloat16` -> `"bfloat16"`; anything else is refused by name."""
    name = str(dtype).removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPES:
        raise MinillmError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)} (or auto)")
    return name


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one decoder-only transformer. Lengths are in tokens, sizes in elements."""

    model_type: str = "llama"
    vocab_size: int = 49152
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_layers: int = 30
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    rope_theta: float = 100000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = True
    attention_bias: bool = False  # on q, k and v (Qwen2)
    attention_out_bias: bool = False  # on o as well (Llama with attention_bias)
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of q and k (Qwen3)
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_family(self.model_type)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            positive_whole(f"config: {name}", value)
            if value > (limit := MAX_LAYERS if name == "num_layers" else MAX_SIZE):
                raise MinillmError(f"config: {name} must be at most {limit}, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            _positive(name, getattr(self, name))
            object.__setattr__(self, name, float(getattr(self, name)))  # JSON may say 10000
        _check_rope_scaling(self.rope_scaling)
        for t in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not isinstance(t, int) or isinstance(t, bool):
                raise MinillmError(f"config: bos and eos token ids must be whole numbers, got {t!r}")
        if self.num_heads % self.num_kv_heads:
            raise MinillmError(
                f"config: num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads}), "
                "since each KV head serves a group of query heads"
            )
        if self.head_dim % 2:
            raise MinillmError(f"config: head_dim must be even for RoPE, got {self.head_dim}")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads per KV head (GQA; Ainslie et al., 2023)."""
        return self.num_heads // self.num_kv_heads

    def replace(self, **changes: Any) -> ModelConfig:
        return replace(self, **changes)

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json` (transformers 4 and 5 spellings of RoPE and dtype)."""
        kind = _check_family(hf.get("model_type"))
        missing = [
            k
            for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            if hf.get(k) is None
        ]
        if missing:
            raise MinillmError(f"config.json lacks {', '.join(missing)}; is this a complete Hugging Face model folder?")
        if _given(hf, "hidden_act", lambda: "silu") != "silu":
            raise MinillmError(f"hidden_act {hf['hidden_act']!r} is not supported; these families use silu")
        if hf.get("quantization_config"):
            raise MinillmError("this folder holds quantised weights; give one with bf16, fp16 or fp32 safetensors")
        if hf.get("use_sliding_window"):
            raise MinillmError(
                "use_sliding_window is set; sliding-window attention is not supported, only full attention"
            )
        rope = hf.get("rope_parameters") or {}
        for name, value in (("rope_parameters", rope), ("rope_scaling", hf.get("rope_scaling"))):
            if value is not None and not isinstance(value, dict):
                raise MinillmError(f"config: {name} must be an object, got {value!r}")
        scaling = hf.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
        if scaling is not None:
            scaling = {k: v for k, v in scaling.items() if k not in ("rope_theta", "type")} | {
                "rope_type": scaling.get("rope_type", scaling.get("type", "default"))
            }
            if scaling["rope_type"] == "default":
                scaling = None
            elif scaling["rope_type"] not in ("llama3", "linear"):
                raise MinillmError(
                    f"rope_type {scaling['rope_type']!r} is not supported; use default, linear or llama3"
                )
        eos = hf.get("eos_token_id")
        bias = _flag(hf, "attention_bias")
        return cls(
            model_type=kind,
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=hf["num_attention_heads"],
            num_kv_heads=_given(hf, "num_key_value_heads", lambda: hf["num_attention_heads"]),
            head_dim=_given(hf, "head_dim", lambda: _head_dim(hf)),
            max_position_embeddings=_given(hf, "max_position_embeddings", lambda: 2048),
            rms_norm_eps=_given(hf, "rms_norm_eps", lambda: 1e-6),
            rope_theta=_given(rope, "rope_theta", lambda: _given(hf, "rope_theta", lambda: 10000.0)),
            rope_scaling=scaling,
            tie_word_embeddings=_flag(hf, "tie_word_embeddings"),
            attention_bias=True if kind == "qwen2" else bias,
            attention_out_bias=False if kind == "qwen2" else bias,
            mlp_bias=_flag(hf, "mlp_bias"),
            qk_norm=kind == "qwen3",
            dtype=_checkpoint_dtype(hf),
            bos_token_id=hf.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        path = Path(folder) / "config.json"
        try:
            hf = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MinillmError(f"{folder} has no config.json; give a Hugging Face model folder") from None
        except (ValueError, OSError, RecursionError) as error:
            raise MinillmError(f"{path} cannot be read as JSON ({error}); fetch the model again") from None
        if not isinstance(hf, dict):
            raise MinillmError(f"{path} does not hold a JSON object; fetch the model again")
        return cls.from_hf(hf)


def _checkpoint_dtype(hf: dict[str, Any]) -> str:
    name = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    return name if name in DTYPES else "float32"


def _given(hf: dict[str, Any], name: str, default: Callable[[], Any]) -> Any:
    """A field of a JSON object; null counts as absent, as it does in the transformers library."""
    value = hf.get(name)
    return default() if value is None else value


def _flag(hf: dict[str, Any], name: str) -> bool:
    value = _given(hf, name, lambda: False)
    if not isinstance(value, bool):  # "false" in quotes would count as true
        raise MinillmError(f"config: {name} must be true or false, got {value!r:.80}")
    return value


def _head_dim(hf: dict[str, Any]) -> Any:
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    try:
        return width // heads
    except (TypeError, ZeroDivisionError):
        raise MinillmError(
            f"config: hidden_size and num_attention_heads must be positive whole numbers, got {width!r} and {heads!r}"
        ) from None


def _check_family(model_type: Any) -> str:
    """One of MODEL_TYPES."""
    if model_type not in MODEL_TYPES:
        raise MinillmError(
            f"model_type {model_type!r} is not supported; minillm runs the dense families {', '.join(MODEL_TYPES)}"
        )
    return str(model_type)


def positive_whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise MinillmError(f"{name} must be a positive whole number, got {value!r}")


def _positive(name: str, value: Any) -> None:
    """A finite number above 0, and one that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_REAL:
        raise MinillmError(f"config: {name} must be a finite number above 0, got {value!r}")


def _check_rope_scaling(scaling: dict[str, Any] | None) -> None:
    """Every key that `scale_rope` reads is there and makes sense."""
    if scaling is None:
        return
    needed = ["factor"]
    if scaling["rope_type"] == "llama3":
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    if missing := [k for k in needed if scaling.get(k) is None]:
        raise MinillmError(f"config: rope scaling {scaling['rope_type']!r} lacks {', '.join(missing)}")
    for name in needed:
        _positive(f"rope scaling's {name}", scaling[name])
    if len(needed) > 1 and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise MinillmError(
            "config: rope scaling's high_freq_factor must be above its low_freq_factor, "
            f"got {scaling['high_freq_factor']} and {scaling['low_freq_factor']}"
        )
