"""Broken folders are refused in words; good ones, sharded or not, tied or not, give the same weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import tiny_hf
from safetensors.torch import load_file, save_file

from minillm import MinillmError, ModelConfig
from minillm.models.weights import expected_shapes, load_weights, random_weights


def read(folder, dtype=torch.float32):
    return load_weights(folder, ModelConfig.from_folder(folder), dtype)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_shards_and_one_file_hold_the_same(family, tiny_folder):
    one, many = read(tiny_folder(family)), read(tiny_folder(family, shard=True))
    assert (tiny_folder(family, shard=True) / "model.safetensors.index.json").is_file()
    assert all(torch.equal(a, b) for a, b in zip(one.tensors(), many.tensors(), strict=True))


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen2", "qwen3"])
def test_nbytes_counts_every_parameter_once(family, tiny_folder):
    oracle = tiny_hf(family)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert read(tiny_folder(family), dtype).nbytes == sum(p.numel() for p in oracle.parameters()) * dtype.itemsize


def test_a_tied_head_is_one_tensor(tiny_folder):
    tied, untied = read(tiny_folder("qwen2")), read(tiny_folder("llama"))
    assert tied.lm_head is tied.embed
    assert not torch.equal(untied.lm_head, untied.embed)


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A private copy of a sharded folder, to be broken."""
    return shutil.copytree(tiny_folder("llama", shard=True), tmp_path / "model")


def shards(folder):
    return sorted(folder.glob("model-*.safetensors"))


def break_missing_shard(folder):
    shards(folder)[1].unlink()


def break_truncated(folder):
    data = shards(folder)[0].read_bytes()
    shards(folder)[0].write_bytes(data[: len(data) // 2])


def break_empty(folder):
    shards(folder)[0].write_bytes(b"")


def break_shape(folder):
    state = load_file(shards(folder)[0])
    name = next(n for n in state if n.endswith("weight"))
    save_file(state | {name: state[name][:1].clone()}, shards(folder)[0])


def break_dtype(folder):
    state = load_file(shards(folder)[0])
    save_file({n: t.to(torch.int8) for n, t in state.items()}, shards(folder)[0])


def break_lost_tensor(folder):
    state = load_file(shards(folder)[0])
    state.popitem()
    save_file(state, shards(folder)[0])


def break_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weights": 1}')


def break_index_json(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')


def break_no_weights(folder):
    for file in folder.glob("model*"):
        file.unlink()


def break_layers(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 4}))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (break_missing_shard, "lacks the shard model-00002"),
        (break_truncated, "damaged or cut short"),
        (break_empty, "damaged or cut short"),
        (break_shape, r"has shape \(1,.*config.json asks for"),
        (break_dtype, "is torch.int8; only fp32, bf16 and fp16"),
        (break_lost_tensor, "that the shard index promises"),
        (break_index, "not a valid shard index"),
        (break_index_json, "not a valid shard index"),
        (break_no_weights, "no model.safetensors"),
        (break_layers, "lacks 9 of 39 tensors, first model.layers.3"),
    ],
)
def test_a_broken_folder_is_named(folder, fault, message):
    fault(folder)
    with pytest.raises(MinillmError, match=message):
        read(folder)


def test_a_folder_without_or_with_broken_config(tmp_path):
    with pytest.raises(MinillmError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(MinillmError, match="cannot be read as JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(MinillmError, match="does not hold a JSON object"):
        ModelConfig.from_folder(tmp_path)


GOOD = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "'mixtral' is not supported"),
        ({"vocab_size": 0}, "vocab_size must be a positive whole number"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "must be a multiple of num_kv_heads"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_type 'dynamic'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(change, message):
    ModelConfig.from_hf(GOOD)
    with pytest.raises(MinillmError, match=message):
        ModelConfig.from_hf(GOOD | change)
    with pytest.raises(MinillmError, match="lacks hidden_size"):
        ModelConfig.from_hf({k: v for k, v in GOOD.items() if k != "hidden_size"})


def test_random_weights_have_the_expected_shapes():
    config = ModelConfig(
        num_layers=2, vocab_size=64, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8
    )
    weights = random_weights(config, torch.bfloat16)
    count = sum(torch.Size(shape).numel() for shape in expected_shapes(config).values())
    assert weights.nbytes == 2 * count
    assert torch.equal(weights.embed, random_weights(config, torch.bfloat16).embed)
