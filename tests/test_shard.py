"""Which slice of each weight a rank holds: together the ranks hold the model once, and read no more than that."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from conftest import FAMILIES, tiny_hf
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models.presets import PRESETS
from minillm.models.weights import expected_shapes, load_weights
from minillm.parallel.shard import (
    Place,
    check,
    kv_heads,
    local_config,
    local_tensors,
    owns_kv,
    sizes_that_fit,
    stage_layers,
)


@pytest.fixture(scope="module")
def smollm(embedded_folder):
    return ModelConfig.from_folder(embedded_folder)


def test_a_size_that_does_not_divide_is_refused_with_those_that_do(smollm):
    assert sizes_that_fit(smollm) == [1, 3]
    with pytest.raises(MinillmError, match=r"tensor_parallel_size 2 .*9 query heads do not divide by 2.*do: 1, 3"):
        check(smollm, 2)
    with pytest.raises(MinillmError, match=r"1536 intermediate values do not divide by 9"):  # the heads would
        check(smollm.replace(vocab_size=9 * 5000), 9)
    with pytest.raises(MinillmError, match="49152 tokens of the vocabulary do not divide by 9"):
        check(smollm.replace(intermediate_size=1539), 9)
    with pytest.raises(MinillmError, match="5 KV heads neither divide by 2 nor are shared evenly"):
        check(smollm.replace(num_heads=10, num_kv_heads=5), 2)
    with pytest.raises(MinillmError, match="pipeline_parallel_size 31 is more than the model's 30 layers"):
        check(smollm, 1, 31)
    for wrong in (0, -1, True, 1.5, "2"):
        with pytest.raises(MinillmError, match="tensor_parallel_size must be a positive whole number"):
            check(smollm, wrong)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "qwen2.5-7b"])
def test_known_models_fit_the_sizes_that_people_use(name):
    fits = sizes_that_fit(PRESETS[name])
    assert ({1, 2, 4, 8} if "llama" in name else {1, 2, 4}) <= set(fits)


@given(st.integers(1, 200), st.data())
def test_layers_of_stages_are_even_and_in_order(layers, data):
    stages = data.draw(st.integers(1, layers))
    parts = [stage_layers(layers, stages, s) for s in range(stages)]
    assert [i for part in parts for i in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def grids(config):
    return [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 3) if tp in sizes_that_fit(config)]


WIDE = {"vocab_size": 212, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_ranks_hold_every_weight_once(family, data):
    """Whatever a rank holds is marked; in the end each element has as many marks as it has replicas."""
    config = ModelConfig.from_hf(tiny_config(family))
    tp, pp = data.draw(st.sampled_from(grids(config)))
    shapes = expected_shapes(config)
    marks = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    for rank in range(tp * pp):
        for name, (_, cut) in local_tensors(config, Place.of_rank(rank, tp, pp), shapes).items():
            marks[name][cut] += 1
    for name, held in marks.items():
        replicas = {1}
        if "norm" in name:
            replicas = {tp}
        elif ".k_proj." in name or ".v_proj." in name:
            replicas = {max(1, tp // config.num_kv_heads)}
        elif name == "model.embed_tokens.weight" and config.tie_word_embeddings and pp > 1:
            replicas = {2}  # the first stage looks up, the last one scores
        assert set(held.unique().tolist()) == replicas, name


_CONFIGS = {}


def tiny_config(family):
    if family not in _CONFIGS:
        _CONFIGS[family] = tiny_hf(family, **WIDE).config.to_dict()
    return _CONFIGS[family]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_rank_has_the_kv_heads_that_its_query_heads_read(tp):
    config = PRESETS["llama-3.1-8b"].replace(num_heads=8, num_kv_heads=2, head_dim=16)
    for rank in range(tp):
        place = Place(rank, tp)
        queries = range(rank * 8 // tp, (rank + 1) * 8 // tp)
        assert {q // config.group_size for q in queries} == set(kv_heads(config, place))
    speakers = [r for r in range(tp) if owns_kv(config, Place(r, tp))]
    assert len(speakers) == min(tp, 2)


class Counting:
    """safetensors' reader, with how many elements of each tensor were read."""

    read: ClassVar[dict[str, int]] = {}

    def __init__(self, real):
        self.real = real

    def __call__(self, *arguments, **options):
        self.reader = self.real(*arguments, **options)
        return self

    def __enter__(self):
        self.inner = self.reader.__enter__()
        return self

    def __exit__(self, *what):
        return self.reader.__exit__(*what)

    def keys(self):
        return self.inner.keys()

    def get_tensor(self, name):
        tensor = self.inner.get_tensor(name)
        self.read[name] = tensor.numel()
        return tensor

    def get_slice(self, name):
        part, read = self.inner.get_slice(name), self.read

        class Slice:
            def get_shape(self):
                return part.get_shape()

            def __getitem__(self, cut):
                tensor = part[cut]
                read[name] = tensor.numel()
                return tensor

        return Slice()


def test_a_rank_reads_its_share_and_no_more(embedded_folder, smollm, monkeypatch):
    import safetensors

    shapes = {name: math.prod(shape) for name, shape in expected_shapes(smollm).items()}
    monkeypatch.setattr(safetensors, "safe_open", Counting(safetensors.safe_open))
    for place in (Place(0, 3), Place(2, 3), Place(1, 3, 1, 2)):
        Counting.read.clear()
        weights = load_weights(embedded_folder, smollm, torch.bfloat16, place=place)
        cut = {name: n for name, n in Counting.read.items() if "norm" not in name}
        assert all(n * 3 == shapes[name] for name, n in cut.items())
        if place.pp == 1:
            assert set(cut) == {name for name in shapes if "norm" not in name}
        assert weights.nbytes == 2 * sum(Counting.read.values())


def test_a_shard_is_the_slice_of_the_whole(embedded_folder, smollm):
    whole = load_weights(embedded_folder, smollm, torch.float32)
    part = load_weights(embedded_folder, smollm, torch.float32, place=Place(1, 3, 1, 2))
    config = local_config(smollm, 3, 2, 1)
    assert (config.num_heads, config.num_kv_heads, config.intermediate_size, config.num_layers) == (3, 1, 512, 15)
    d, there = smollm.head_dim, whole.layers[15]
    q, k, v = there.qkv.split((9 * d, 3 * d, 3 * d))
    assert torch.equal(part.layers[0].qkv, torch.cat((q[3 * d : 6 * d], k[d : 2 * d], v[d : 2 * d])))
    assert torch.equal(part.layers[0].down, there.down[:, 512:1024])
    assert torch.equal(part.lm_head, whole.embed[16384:32768])
    assert part.embed.numel() == 0  # the first stage's
