"""Weights: read from safetensors (one file or shards), checked, and fused as the engine wants them.

q, k and v are stacked into one matrix, gate and up into another: the same bytes, fewer operator calls.
Every fault of a folder (missing shard, missing tensor, wrong shape, truncated file) is named.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.parallel.shard import ALL, Place, Slices, local_config, local_tensors

WHOLE = Place()  # a model on one rank


@dataclass
class LayerWeights:
    """One decoder layer. D hidden, I intermediate, q = heads * head_dim, kv = kv_heads * head_dim; rows are outputs."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [q + 2 kv, D]
    o: Tensor  # [D, q]
    post_norm: Tensor  # [D]
    gate_up: Tensor  # [2 I, D]
    down: Tensor  # [D, I]
    qkv_bias: Tensor | None = None  # [q + 2 kv]
    o_bias: Tensor | None = None  # [D]
    gate_up_bias: Tensor | None = None  # [2 I]
    down_bias: Tensor | None = None  # [D]
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None  # [head_dim]


@dataclass
class Weights:
    """A whole model. `lm_head` is the same tensor as `embed` when the two are tied."""

    embed: Tensor  # [V, D]; of a rank its share of V, and empty where a pipeline stage has none (lesson 14)
    layers: list[LayerWeights]
    final_norm: Tensor  # [D]
    lm_head: Tensor  # [V, D]

    def tensors(self) -> list[Tensor]:
        """Every tensor once: a tied head is not counted twice."""
        found = [self.embed, self.final_norm] + ([] if self.lm_head is self.embed else [self.lm_head])
        return found + [t for layer in self.layers for t in vars(layer).values() if t is not None]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Hugging Face checkpoint of this configuration must hold, with its shape."""
    D, I, q, kv, d = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size, config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (q, D),
        "self_attn.k_proj.weight": (kv, D),
        "self_attn.v_proj.weight": (kv, D),
        "self_attn.o_proj.weight": (D, q),
        "post_attention_layernorm.weight": (D,),
        "mlp.gate_proj.weight": (I, D),
        "mlp.up_proj.weight": (I, D),
        "mlp.down_proj.weight": (D, I),
    }
    if config.attention_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.attention_out_bias:
        layer["self_attn.o_proj.bias"] = (D,)
    if config.mlp_bias:
        layer |= {"mlp.gate_proj.bias": (I,), "mlp.up_proj.bias": (I,), "mlp.down_proj.bias": (D,)}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    shapes = {"model.embed_tokens.weight": (config.vocab_size, D), "model.norm.weight": (D,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, D)
    return shapes


def fuse(config: ModelConfig, state: dict[str, Tensor], place: Place = WHOLE) -> Weights:
    """Stack a checkpoint's tensors into `Weights`. Takes each tensor out of `state`, so that memory is held once.

    config: of the rank (`shard.local_config`); place: which rank it is. A stage of a pipeline has empty tensors in
    place of the embedding, the final norm and the head that other stages have.
    """

    def stack(prefix: str, names: tuple[str, ...], kind: str) -> Tensor | None:
        parts = [state.pop(f"{prefix}{name}.{kind}", None) for name in names]
        found = [p for p in parts if p is not None]
        return None if not found else found[0] if len(found) == 1 else torch.cat(found)

    layers = []
    for i in range(config.num_layers):
        p = f"model.layers.{i}."
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        values: dict[str, Any] = {
            "input_norm": stack(p, ("input_layernorm",), "weight"),
            "qkv": stack(p, qkv, "weight"),
            "o": stack(p, ("self_attn.o_proj",), "weight"),
            "post_norm": stack(p, ("post_attention_layernorm",), "weight"),
            "gate_up": stack(p, gate_up, "weight"),
            "down": stack(p, ("mlp.down_proj",), "weight"),
            "qkv_bias": stack(p, qkv, "bias"),
            "o_bias": stack(p, ("self_attn.o_proj",), "bias"),
            "gate_up_bias": stack(p, gate_up, "bias"),
            "down_bias": stack(p, ("mlp.down_proj",), "bias"),
            "q_norm": stack(p, ("self_attn.q_norm",), "weight"),
            "k_norm": stack(p, ("self_attn.k_norm",), "weight"),
        }
        layers.append(LayerWeights(**values))
    nothing = layers[0].input_norm.new_empty((0, config.hidden_size))
    embed = state.pop("model.embed_tokens.weight", nothing)
    head = embed if config.tie_word_embeddings else state.pop("lm_head.weight", nothing)
    if not place.last:
        return Weights(embed=embed, layers=layers, final_norm=nothing[:, 0], lm_head=nothing)
    norm = state.pop("model.norm.weight")
    return Weights(embed=embed if place.first else nothing, layers=layers, final_norm=norm, lm_head=head)


def load_weights(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: str | torch.device = "cpu",
    place: Place = WHOLE,
) -> Weights:  # fmt: skip
    """Read a Hugging Face folder. Raises MinillmError naming the file and the tensor that is at fault.

    config: of the whole model. place: the rank whose share is read (lesson 14); of a tensor that is cut, only its slice
    is read from the file.
    """
    folder = Path(folder)
    shapes = expected_shapes(config)
    wanted = local_tensors(config, place, shapes)
    state: dict[str, Tensor] = {}
    for file, names in _files(folder, shapes).items():
        state |= _read_file(file, names, shapes, wanted, dtype, device)
    missing = sorted(set(wanted) - set(state))
    if missing:
        raise MinillmError(
            f"{folder} lacks {len(missing)} of {len(wanted)} tensors, first {missing[0]}; "
            "the folder is incomplete, or its config.json is of another model"
        )
    local = {wanted[name][0]: state.pop(name) for name in list(state)}
    return fuse(local_config(config, place.tp, place.pp, place.stage), local, place)


def _files(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[Path, list[str] | None]:
    """File -> the tensors to take from it (None: whichever of the expected ones it holds)."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            if not all(isinstance(f, str) and Path(f).name == f for f in weight_map.values()):
                raise ValueError("weight_map must give file names in this folder")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise MinillmError(f"{index} is not a valid shard index ({error}); fetch the model again") from None
        files: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            if name in shapes:
                files.setdefault(folder / file, []).append(name)  # type: ignore[union-attr]
        for shard in files:
            if not shard.is_file():
                raise MinillmError(
                    f"{folder} lacks the shard {shard.name} that {index.name} names; fetch the model again"
                )
        return files
    if single.is_file():
        return {single: None}
    raise MinillmError(
        f"{folder} has no model.safetensors (nor an index of shards); only safetensors checkpoints are read"
    )


def _read_file(
    file: Path,
    names: list[str] | None,
    shapes: dict[str, tuple[int, ...]],
    wanted: dict[str, tuple[str, Slices]],
    dtype: torch.dtype,
    device: str | torch.device,
) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    state = {}
    try:
        with safe_open(file, framework="pt", device=str(device)) as reader:
            held = set(reader.keys())
            for name in held & shapes.keys() if names is None else names:
                if name not in held:
                    raise MinillmError(
                        f"{file.name} lacks the tensor {name} that the shard index promises; fetch the model again"
                    )
                held_slice = reader.get_slice(name)
                if tuple(held_slice.get_shape()) != shapes[name]:
                    raise MinillmError(
                        f"{file.name}: {name} has shape {tuple(held_slice.get_shape())}, config.json asks for "
                        f"{shapes[name]}"
                    )
                if name not in wanted:  # another rank's
                    continue
                cut = wanted[name][1]
                tensor = reader.get_tensor(name) if all(s == ALL for s in cut) else held_slice[cut]
                if not tensor.is_floating_point() or tensor.itemsize < 2:
                    raise MinillmError(
                        f"{file.name}: {name} is {tensor.dtype}; only fp32, bf16 and fp16 checkpoints are read"
                    )
                state[name] = tensor.to(dtype)
    except (SafetensorError, OSError) as error:
        raise MinillmError(
            f"{file} cannot be read ({error}); it is damaged or cut short, fetch the model again"
        ) from None
    return state


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    std: float = 0.02,
) -> Weights:
    """Normal weights of the right shapes, norms around one: for tests and for benchmarks that need no download."""
    generator = torch.Generator(device=device).manual_seed(seed)
    state = {}
    for name, shape in expected_shapes(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std, generator=generator)
        state[name] = tensor.add_(1.0) if name.endswith("norm.weight") else tensor
    return fuse(config, state)
