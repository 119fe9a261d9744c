"""Lesson 14's exercise: its references agree with the engine's own parts, and the answers write in a real model."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.config import ModelConfig
from minillm.course.adapters.sharded import Parts, write
from minillm.course.candidate import local
from minillm.course.checks import judge, load_lesson, rings, sharded, split_vocabulary, stages
from minillm.course.report import result_text
from minillm.models.weights import random_weights
from minillm.parallel import pipeline, ring, shard
from minillm.parallel.group import RankLost, run_threads
from minillm.parallel.shard import Place, local_tensors
from minillm.request import Request, SamplingParams
from minillm.rng import gumbel, keys
from minillm.sampler import Sampler

SHAPES = [(1, 1), (4, 1), (6, 3), (8, 2), (9, 3), (12, 4)]  # heads, KV heads


def tiny(heads: int, kv: int) -> ModelConfig:
    return ModelConfig(vocab_size=96, hidden_size=32, intermediate_size=24, num_layers=2, num_heads=heads,
                       num_kv_heads=kv, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False)  # fmt: skip


# The references, against what the engine itself uses


@pytest.mark.parametrize(("heads", "kv"), SHAPES)
def test_a_rank_holds_what_the_engine_gives_it(heads, kv):
    config = tiny(heads, kv)
    whole = random_weights(config, torch.float32, seed=1).layers[0].qkv
    q, k, v = whole.split((heads * 8, kv * 8, kv * 8))
    named = {"q_proj": q, "k_proj": k, "v_proj": v}
    for size in range(1, heads + 1):
        fits = heads % size == 0 and (kv % size == 0 or size % kv == 0)
        if not fits:
            with pytest.raises(ValueError, match="do not split"):
                sharded.shard_qkv(whole, heads, kv, 8, 0, size)
            continue
        for rank in range(size):
            place = Place(rank, size)
            parts = []
            for name, w in named.items():
                key = f"model.layers.0.self_attn.{name}.weight"
                (_, cut) = local_tensors(config, place, {key: tuple(w.shape)})[key]
                parts.append(w[cut])
            assert torch.equal(sharded.shard_qkv(whole, heads, kv, 8, rank, size), torch.cat(parts)), (size, rank)


@given(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_the_ring_is_the_engines(size, shape):
    rng = torch.Generator().manual_seed(size)
    x = [torch.randint(-9, 9, shape, generator=rng).float() for _ in range(size)]
    mine, theirs = (run_threads(size, lambda group, f=f: f(group, x[group.rank]))
                    for f in (rings.ring_all_reduce, ring.ring_all_reduce))  # fmt: skip
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, sum(x))


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 3))
def test_a_timetable_is_the_engines(lengths, count, hop):
    seconds = [x / 4 for x in lengths]
    mine = stages.pipeline(seconds, count, hop / 8)
    slots = pipeline.timetable([[t] * count for t in seconds], link_s=hop / 8)
    assert mine["start"] == [[s.start for s in slots if s.stage == i] for i in range(len(seconds))]
    assert mine["seconds"] == pipeline.makespan(slots)
    assert mine["bubble"] == pytest.approx(pipeline.idle_share(slots))
    if len(set(seconds)) == 1 and not hop:
        assert mine["bubble"] == pytest.approx(pipeline.bubble(len(seconds), count))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_token_is_the_samplers(size):
    rng, requests = torch.Generator().manual_seed(3), []
    logits = 3 * torch.randn(12, 64, generator=rng)
    for b in range(12):
        params = SamplingParams(temperature=(0.0, 0.7, 1.3)[b % 3], seed=b, max_tokens=4)
        requests.append(Request(f"r{b}", list(range(1, 3 + b)), params, b))
    want = Sampler().sample(logits, requests)[0]
    heat = [r.params.temperature for r in requests]
    draws = [(b, r.num_tokens) for b, r in enumerate(requests)]
    for tokens in run_threads(size, lambda group: split_vocabulary.next_tokens(
            group, logits.chunk(size, 1)[group.rank], heat, draws)):  # fmt: skip
        assert tokens == list(want)


# A model whose layers are the answers

REFERENCES = {
    "shard_qkv": sharded.shard_qkv, "parallel_mlp": sharded.parallel_mlp, "all_reduce": rings.ring_all_reduce,
    "next_tokens": split_vocabulary.next_tokens,
}  # fmt: skip


def written(ranks: int, config: ModelConfig, temperature: float = 0.0, **parts):
    weights = random_weights(config, torch.float32, seed=2, std=0.3)
    prompt = random.Random(4).choices(range(96), k=7)
    return write(config, weights, Parts(**REFERENCES | parts), prompt, ranks=ranks, max_tokens=6,
                 temperature=temperature, seed=5)  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize(("heads", "kv", "ranks"), [(6, 3, 3), (8, 2, 4), (4, 4, 2)])
def test_ranks_write_what_one_writes(heads, kv, ranks, temperature):
    config = tiny(heads, kv)
    one, many = written(1, config, temperature), written(ranks, config, temperature)
    assert many.agree
    assert many.tokens[0] == one.tokens[0]
    assert many.calls["send"] == 6 * 2 * config.num_layers * 2 * (ranks - 1), "two rings a layer and step"
    assert "all_reduce" not in many.calls


BROKEN = {
    "no all-reduce": {"all_reduce": lambda group, x: x},
    "bias apart, the mean": {"parallel_mlp": partial(sharded.mlp_with, reduce="mean")},
    "heads in the wrong order": {"shard_qkv": partial(sharded.qkv_with, queries="reversed")},
    "ids of the slice": {"next_tokens": partial(split_vocabulary.next_with, ids="local")},
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_mistake_changes_the_text(name):
    assert written(3, tiny(6, 3), **BROKEN[name]).tokens[0] != written(1, tiny(6, 3)).tokens[0]


def test_ranks_that_believe_themselves_do_not_agree():
    assert not written(3, tiny(6, 3), next_tokens=partial(split_vocabulary.next_with, says="nothing")).agree


def test_a_rank_that_leaves_a_sum_out_is_told():
    def lazy(group, x):
        return x if group.rank == 0 else group.all_reduce(x)

    with pytest.raises(RankLost, match="in vain|sent nothing|one shape"):
        run_threads(2, lambda group: lazy(group, torch.ones(2)), timeout_s=0.5)


def test_the_sizes_that_the_engine_refuses_are_those_that_the_exercise_refuses():
    said = sharded.refused(local(sharded.shard_qkv), [(9, 3, 2), (12, 4, 6), (8, 2, 4), (9, 3, 3)])
    assert [line.endswith("refused") for line in said] == [True, True, False, False]
    for heads, kv, size in ((9, 3, 2), (12, 4, 6), (8, 2, 4), (9, 3, 3)):
        config = tiny(heads, kv).replace(intermediate_size=24 * size, vocab_size=96 * size)
        assert (shard.why_not(config, size) is None) == (heads % size == 0 and (kv % size == 0 or size % kv == 0))


# Right answers that are written in another way than the solution


def by_row_numbers(w, num_heads, num_kv_heads, head_dim, rank, size):
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ValueError("heads do not divide")
    mine = range(rank * num_heads // size, (rank + 1) * num_heads // size)
    kv = sorted({h * num_kv_heads // num_heads for h in mine})
    heads = [*mine, *(num_heads + k for k in kv), *(num_heads + num_kv_heads + k for k in kv)]
    return w.reshape(-1, head_dim, w.shape[1])[heads].reshape(-1, w.shape[1])


def bias_shared_out(group, x, gate_up, down, bias):
    gate, up = (x @ gate_up.T).chunk(2, -1)
    out = (F.silu(gate) * up) @ down.T
    return group.all_reduce(out if bias is None else out + bias / group.size)


def bias_from_rank_0(group, x, gate_up, down, bias):
    gate, up = (x @ gate_up.T).chunk(2, -1)
    out = (F.silu(gate) * up) @ down.T
    return group.all_reduce(out if bias is None or group.rank else out + bias)


def the_finished_chunk_is_its_own(group, x):
    """Begins one chunk earlier, so that rank r ends the first round with chunk r."""
    n, r = group.size, group.rank
    chunks = list(x.clone().reshape(-1).tensor_split(n))
    for step in range(2 * (n - 1)):
        group.send(chunks[(r - step - 1) % n], (r + 1) % n)
        at = (r - step - 2) % n
        got = group.recv(torch.empty_like(chunks[at]), (r - 1) % n)
        chunks[at] = chunks[at] + got if step < n - 1 else got
    return torch.cat(chunks).reshape(x.shape)


def stage_by_stage(stage_s, micro_batches, hop_s):
    start, ready = [], [0.0] * micro_batches
    for seconds in stage_s:
        row = []
        for at in ready:
            row.append(max(at, row[-1] + seconds if row else 0.0))
        start.append(tuple(row))
        ready = [at + seconds + hop_s for at in row]
    end = start[-1][-1] + stage_s[-1]
    idle = sum(end - micro_batches * seconds for seconds in stage_s)
    return {"bubble": idle / (len(stage_s) * end), "seconds": end, "start": start}


def all_rows_at_once(group, logits, temperatures, draws):
    ids = torch.arange(logits.shape[1]) + group.rank * logits.shape[1]
    heat = torch.tensor(temperatures)[:, None]
    noise = gumbel(keys([tuple(draw) for draw in draws]), ids)
    score, at = torch.where(heat > 0, logits / heat.clamp(min=1e-9) + noise, logits).max(1)
    scores, winners = torch.stack(group.all_gather(score)), torch.stack(group.all_gather(ids[at]))
    return winners.gather(0, scores.argmax(0)[None])[0].tolist()


def with_the_embedding():
    """The lesson counts 161 all-reduces a token, the exercise 160."""
    said = 161 * (10e-6 + 16_384 / 400e9)
    return {"rank_gb": 70, "reduced_mb": 161 * 16_384 / 1e6, "token_ms": 35 + 1e3 * said,
            "break_even_us": 35e3 / 161 - 0.041, "kv_kb": 40.96, "bubble": 3 / 11}  # fmt: skip


@pytest.mark.parametrize(("task", "answer"), [
    ("14.1", with_the_embedding), ("14.2", by_row_numbers), ("14.3", bias_shared_out), ("14.3", bias_from_rank_0),
    ("14.4", the_finished_chunk_is_its_own), ("14.5", stage_by_stage), ("14.6", all_rows_at_once),
])  # fmt: skip
def test_a_right_answer_in_another_style_earns_all_points(task, answer):
    task = load_lesson("14").by_id[task]
    result = judge(task, answer)
    assert result.points == task.points, result_text(result)
