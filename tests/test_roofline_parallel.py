"""A rank's operators against the whole model's and the engine's shards, the step against predict.py and by hand."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models.presets import PRESETS, preset
from minillm.models.weights import expected_shapes
from minillm.parallel.pipeline import micro_batches
from minillm.parallel.shard import Place, local_tensors, sizes_that_fit
from minillm.roofline import cost, parallel
from minillm.roofline.comm import Link, link
from minillm.roofline.device import DATASHEET, Device
from minillm.roofline.parallel import predict_parallel, rank_memory, rank_ops, rank_parameters
from minillm.roofline.predict import predict_step

H200, NVLINK = DATASHEET["h200"], link("nvlink4")
BOTH = {"tp_link": NVLINK, "pp_link": NVLINK}
SMOL, SMALL, LARGE = (preset(n) for n in ("smollm2-135m", "llama-3.1-8b", "llama-3.1-70b"))
MEASURED = Device("here", "cpu", {"bfloat16": 1e11, "float32": 1e11}, 1e10, 2e10, 1.5e10, 5e9, 8 * 10**9, 3e-6,
                  gemm={"bfloat16": {1: 1e10, 64: 5e10}})  # fmt: skip
FAMILIES = {
    "tied": {},
    "untied with biases": {"tie_word_embeddings": False, "attention_bias": True, "attention_out_bias": True,
                           "mlp_bias": True},
    "norms of heads": {"model_type": "qwen3", "qk_norm": True, "tie_word_embeddings": False},
}  # fmt: skip


def tiny(family="tied", **more):
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 72, "num_layers": 5, "num_heads": 12,
             "num_kv_heads": 4, "head_dim": 8}  # fmt: skip
    return ModelConfig(**(sizes | FAMILIES[family] | more))


rows_of = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 4096)), min_size=1, max_size=9)


@given(rows_of, st.sampled_from(sorted(PRESETS)), st.sampled_from((H200, MEASURED)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_one_rank_is_predict_step(rows, name, device, captured):
    """To the bit: the same operators, added in the same order."""
    alone = predict_step(preset(name), rows, device, captured=captured)
    found = predict_parallel(preset(name), rows, device, captured=captured)
    assert (found.expected, found.lower, found.upper) == (alone.expected, alone.lower, alone.upper)
    assert found.terms == {"compute": alone.expected, "all_reduce": 0, "all_gather": 0, "send": 0, "idle": 0}
    assert found.tokens == alone.tokens
    assert found.all_reduces == 0


@given(rows_of, st.sampled_from(sorted(FAMILIES)), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_stages_together_are_the_model(rows, family, pp):
    config = tiny(family)
    whole = cost.total(cost.step(config, rows))
    parts = cost.total([op for s in range(pp) for op in rank_ops(config, rows, pp=pp, stage=s)])
    assert dataclasses.replace(parts, rows=0) == dataclasses.replace(whole, rows=0)


@given(rows_of, st.sampled_from((1, 2, 4, 12)))
@settings(max_examples=60, deadline=None)
def test_ranks_together_are_the_model(rows, tp):
    """Products, KV and weights are divided. What is done on every rank again: norms, residual, replicated KV heads."""
    config = tiny("untied with biases")
    whole = {op.name: op for op in cost.step(config, rows)}
    for op in rank_ops(config, rows, tp=tp):
        if op.name in ("o_proj", "down", "gate_up", "lm_head", "attention"):
            assert op.flops * tp == whole[op.name].flops
        if op.name in ("rms_norm", "residual", "embedding"):
            assert op.bytes == whole[op.name].bytes
        if op.name in ("gate_up", "lm_head"):
            assert op.weights * tp == whole[op.name].weights
        if op.name in ("attention", "kv_write"):
            assert (op.kv_read * tp, op.kv_written * tp) == tuple(
                n * max(1, tp // config.num_kv_heads) for n in (whole[op.name].kv_read, whole[op.name].kv_written)
            )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (12, 1), (1, 2), (1, 5), (2, 3), (4, 2)])
def test_a_rank_holds_what_the_engine_loads(family, tp, pp):
    """Against the slices that the loader reads, tensor by tensor; no other rank of the stage holds more."""
    config = tiny(family)
    shapes = expected_shapes(config)
    for stage in range(pp):
        held = [_elements(config, shapes, Place(r, tp, stage, pp)) for r in range(tp)]
        assert rank_parameters(config, tp=tp, pp=pp, stage=stage) == held[0] == max(held)


def _elements(config, shapes, place):
    total = 0
    for name, (_, slices) in local_tensors(config, place, shapes).items():
        count = 1
        for n, s in zip(shapes[name], slices, strict=True):
            count *= len(range(*s.indices(n)))
        total += count
    return total


@pytest.mark.parametrize("name", PRESETS)
def test_one_rank_holds_the_model(name):
    assert rank_parameters(preset(name)) == cost.parameter_count(preset(name))
    memory = rank_memory(preset(name), H200)
    assert memory.kv_token == cost.kv_bytes_per_token(preset(name), "bfloat16")


def test_messages_by_hand():
    """8 B over two: 32 layers, two sums each and the embedding's, of 3 tokens of 4096 bf16; half of the vocabulary."""
    s = predict_parallel(SMALL, [(1, 100)] * 3, H200, tp=2, tp_link=NVLINK)
    assert s.all_reduces == 65
    assert s.all_reduce == pytest.approx(65 * NVLINK.all_reduce(3 * 4096 * 2, 2))
    assert s.all_gather == pytest.approx(NVLINK.all_gather(3 * 64128 * 2, 2))
    assert (s.send, s.idle) == (0, 0)
    assert s.expected == pytest.approx(sum(s.terms.values()))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (1, 1)])
def test_the_engine_says_what_is_predicted(tp, pp):
    """Calls and bytes of every rank's traffic, counted in the real executor, cost on a link what is predicted."""
    import torch

    from minillm.attention.paged import PagedReference
    from minillm.attention.protocol import Row
    from minillm.cache.pool import KVPool
    from minillm.models.transformer import Transformer
    from minillm.models.weights import fuse
    from minillm.parallel.executor import StageExecutor
    from minillm.parallel.group import Alone, run_threads
    from minillm.parallel.linear import parallelise
    from minillm.parallel.runner import cut
    from minillm.parallel.shard import local_config

    config = tiny()
    shapes, rows = expected_shapes(config), [(3, 0), (1, 0), (4, 0)]

    def work(world):
        place = Place(world.rank % tp, tp, world.rank // tp, pp)
        local = local_config(config, tp, pp, place.stage)
        held = {
            here: torch.ones(shapes[name])[part] for name, (here, part) in local_tensors(config, place, shapes).items()
        }
        model = parallelise(Transformer(local, fuse(local, held, place)), world if tp > 1 else Alone(), place)
        asked = [Row(i, 0, n, blocks=[i + 1]) for i, (n, _) in enumerate(rows)]
        parts, _ = cut(asked, [1] * sum(n for n, _ in rows), [0, 1, 2], pp, torch.device("cpu"))
        world.traffic.clear()
        StageExecutor(model, PagedReference(KVPool(local, 4, 16, torch.float32)), world, place).step(parts)
        return dict(world.traffic.calls), dict(world.traffic.bytes)

    wire = Link("wire", 1e6, 1e-3, 1e-4)
    s = predict_parallel(config, rows, MEASURED, "float32", tp=tp, pp=pp, tp_link=wire, pp_link=wire)
    said = run_threads(tp * pp, work)
    if tp > 1:
        calls, nbytes = said[0]
        assert calls == {"all_reduce": s.all_reduces, "all_gather": 1}
        slope = 2 * (tp - 1) / tp / wire.bandwidth
        assert s.all_reduce == pytest.approx(calls["all_reduce"] * wire.latency(tp) + slope * nbytes["all_reduce"])
        assert s.all_gather == pytest.approx(wire.all_gather(nbytes["all_gather"], tp))
    elif pp > 1:
        (calls, sent), (back, returned) = said
        assert (calls["send"], back["send"]) == (s.micro_batches, 1)
        assert sent["send"] == sum(n for n, _ in rows) * config.hidden_size * 4
        assert returned["send"] == len(rows) * config.vocab_size * 4
        parts = micro_batches(rows, pp, lambda row: row[0])
        first, last = (sum(n for n, _ in p) * config.hidden_size * 4 for p in (parts[0], parts[-1]))
        out = wire.send(returned["send"])
        assert wire.send(min(first, last)) + out <= s.send <= wire.send(first) + wire.send(last) + out
    else:
        assert said == [({}, {})]


def test_a_pipeline_by_hand():
    """Two equal stages, one sequence: each works half of the step; hidden states go on, logits come back."""
    config = preset("llama-3.1-70b").replace(tie_word_embeddings=True)
    s = predict_parallel(config, [(1, 100)], H200, pp=2, pp_link=NVLINK)
    assert s.send == pytest.approx(NVLINK.send(8192 * 2) + NVLINK.send(128256 * 2))
    alone = predict_step(config, [(1, 100)], H200).expected
    assert s.compute == pytest.approx(alone / 2)
    assert s.expected == pytest.approx(alone + s.send)
    assert s.idle == pytest.approx(s.compute)


@given(st.sampled_from(("llama-3.1-8b", "llama-3.1-70b", "smollm2-135m", "qwen3-8b")), rows_of, st.data())
@settings(max_examples=60, deadline=None)
def test_laws_of_a_step(name, rows, data):
    config = preset(name)
    tp = data.draw(st.sampled_from([n for n in sizes_that_fit(config) if n <= 8]))
    pp, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    at = data.draw(st.sampled_from([link(n) for n in ("nvlink4", "pcie5", "eth25")]))
    s = predict_parallel(config, rows, H200, tp=tp, pp=pp, tp_link=at, pp_link=at, count=count)
    assert s.lower <= s.expected <= s.upper * (1 + 1e-12)
    assert s.expected == pytest.approx(sum(s.terms.values()), rel=1e-9)
    assert min(s.terms.values()) >= 0
    assert s.micro_batches == min(count, len(rows))
    slower = dataclasses.replace(at, bandwidth=at.bandwidth / 3, start=2 * at.start)
    worse = predict_parallel(config, rows, H200, tp=tp, pp=pp, tp_link=slower, pp_link=slower, count=count)
    assert worse.expected >= s.expected
    assert worse.compute == s.compute
    assert rank_memory(config, H200, tp=tp, pp=pp).weights <= rank_memory(config, H200).weights


def decode(config, batch, **how):
    return predict_parallel(config, [(1, 2048)] * batch, H200, **how).expected


def test_tensor_parallelism_helps_one_token_where_the_link_is_quick():
    alone = decode(SMALL, 1)
    assert decode(SMALL, 1, tp=2, tp_link=NVLINK) < 0.75 * alone
    assert decode(SMALL, 1, tp=8, tp_link=NVLINK) < 0.5 * alone
    assert decode(SMALL, 1, tp=2, tp_link=link("eth25")) > 0.9 * alone
    assert decode(SMALL, 32, tp=2, tp_link=link("eth25")) > alone
    assert decode(SMOL, 1, tp=3, tp_link=NVLINK) > decode(SMOL, 1)  # nothing to divide, and 61 sums


def test_pipelines_do_not_help_one_token():
    for config in (SMALL, LARGE):
        for pp in (2, 4, 8):
            assert decode(config, 1, pp=pp, pp_link=NVLINK) > decode(config, 1)


def test_seventy_billion_do_not_fit_one():
    assert not rank_memory(LARGE, H200).fits
    assert not rank_memory(LARGE, H200, share=1.0).fits
    two = rank_memory(LARGE, H200, tp=2)
    assert two.fits
    assert 0.4 * two.budget < two.weights < 0.6 * two.budget
    assert two.kv_tokens == pytest.approx(rank_memory(LARGE, H200, pp=2).kv_tokens, rel=0.01)


def test_replicated_kv_heads_cost_memory():
    wide = SMALL.replace(num_heads=64, head_dim=64)
    assert rank_memory(wide, H200, tp=16).kv_token == rank_memory(wide, H200, tp=8).kv_token


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: predict_parallel(SMOL, [(1, 1)], H200, tp=2, **BOTH), "sizes that do: 1, 3"),
        (lambda: predict_parallel(SMOL, [(1, 1)], H200, pp=31, **BOTH), "30 layers"),
        (lambda: predict_parallel(SMALL, [(1, 1)], H200, tp=2), "give tp_link"),
        (lambda: predict_parallel(SMALL, [(1, 1)], H200, pp=2), "give pp_link"),
        (lambda: predict_parallel(SMALL, [(1, 1)], H200, pp=2, pp_link=NVLINK, count=0), "micro-batch"),
        (lambda: predict_parallel(SMALL, [], H200), "rows"),
        (lambda: rank_memory(SMALL, H200, share=1.5), "share"),
        (lambda: rank_memory(SMALL, H200, tp=3), "sizes that do"),
    ],
)
def test_bad_input_is_refused_in_words(make, message):
    with pytest.raises(MinillmError, match=message):
        make()


MUTANTS = {
    "one sum a layer": ("predict_parallel", "sums = 2 * len", "sums = len", test_messages_by_hand),
    "no sum for the embedding": ("predict_parallel", "+ (stage == 0) if", "if", test_messages_by_hand),
    "gather of the whole vocabulary": ("predict_parallel", "config.vocab_size // tp * size", "config.vocab_size * size",
                                       test_messages_by_hand),
    "logits never come back": ("predict_parallel", "= ends(busy, sends) + back", "= ends(busy, sends)",
                               test_a_pipeline_by_hand),
    "logits of the last micro-batch alone": ("predict_parallel", "len(rows) * config.vocab_size",
                                             "len(batches[-1]) * config.vocab_size",
                                             lambda: test_the_engine_says_what_is_predicted(1, 2)),
    "a whole vocabulary on each rank": ("rank_parameters", "config.vocab_size // tp", "config.vocab_size",
                                        lambda: test_a_rank_holds_what_the_engine_loads("tied", 2, 1)),
    "a tied table held twice": ("rank_parameters", "head = last and not (config.tie_word_embeddings and first)",
                                "head = last", lambda: test_a_rank_holds_what_the_engine_loads("tied", 1, 1)),
    "stages do not wait": ("predict_parallel", "makespan(timetable(seconds, link_s=link_s))", "max(map(sum, seconds))",
                           test_a_pipeline_by_hand),
    "what is sent takes no time": ("predict_parallel", "link_s=link_s", "link_s=0.0", test_a_pipeline_by_hand),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_seen(name, monkeypatch):
    import inspect
    import sys

    function, right, wrong, check = MUTANTS[name]
    source = inspect.getsource(getattr(parallel, function))
    assert right in source
    space = dict(vars(parallel))
    exec("from __future__ import annotations\n" + source.replace(right, wrong), space)
    monkeypatch.setattr(sys.modules[__name__], function, space[function])
    with pytest.raises(AssertionError):
        check()
