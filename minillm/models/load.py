"""From a folder to a transformer on a device, as an engine's options ask for it: whole, or one rank's share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minillm.config import ModelConfig
from minillm.device import pick_dtype
from minillm.engine_config import EngineConfig
from minillm.models.compiled import compile_ops, expect_compilation
from minillm.models.transformer import Transformer
from minillm.models.weights import WHOLE, load_weights
from minillm.parallel.linear import parallelise
from minillm.parallel.shard import local_config
from minillm.quant import quantize_model

if TYPE_CHECKING:
    from minillm.parallel.ranks import Ranks


def load_transformer(
    folder: Path, model_config: ModelConfig, config: EngineConfig, device: torch.device, ranks: Ranks | None = None
) -> Transformer:
    """Read, place, pack or quantise, compile. ranks: those that share the layers (lesson 14). Raises MinillmError."""
    place = WHOLE if ranks is None else ranks.place
    if config.compile:
        expect_compilation(device)  # before the weights are read
    dtype = pick_dtype(config.dtype, model_config.dtype, device)
    weights = load_weights(folder, model_config, dtype, device, place)
    local = local_config(model_config, place.tp, place.pp, place.stage)
    pack = device.type == "cpu" and config.quantization is None  # quantised weights are packed on their own
    transformer = Transformer(local, weights, config.max_model_len, pack=pack)
    if config.quantization is not None:
        quantize_model(transformer, config.quantization)
    if config.compile:
        compile_ops(transformer)
    return transformer if ranks is None else parallelise(transformer, ranks.stage, place)
