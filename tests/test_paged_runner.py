"""The paged engine: same tokens as the contiguous one, no block lost whoever leaves when, promises kept."""

from __future__ import annotations

import contextlib
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import LLM, SamplingParams
from minillm.attention.paged import PagedSDPA
from minillm.attention.protocol import Batch, Row
from minillm.attention.triton import TritonAttention, TritonOps
from minillm.cache.blocks import BlockAllocator
from minillm.cache.paged import PagedCache
from minillm.cache.pool import LARGEST, KVPool, block_bytes, quantize_kv
from minillm.config import ModelConfig
from minillm.device import on
from minillm.engine_config import EngineConfig
from minillm.errors import MinillmError, RequestError
from minillm.graphs import DecodeGraphs, buckets
from minillm.models.transformer import Transformer
from minillm.models.weights import random_weights
from minillm.request import Request
from minillm.runner import NaiveRunner, PagedRunner

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=64, intermediate_size=32, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=64,
    max_position_embeddings=96,
)  # fmt: skip
MODEL = Transformer(CONFIG, random_weights(CONFIG, std=0.1))
BLOCK = 16


def request(prompt: list[int], max_tokens: int = 16) -> Request:
    return Request("r", prompt, SamplingParams(), seed=0, max_tokens=max_tokens)


def runner(
    blocks: int, graphs: bool = False, attention=PagedSDPA, model: Transformer = MODEL, **options
) -> PagedRunner:
    cache = PagedCache(KVPool(CONFIG, blocks, BLOCK, torch.float32))
    backend = attention(cache.pool)
    return PagedRunner(model, cache, backend, DecodeGraphs(model, backend, **options) if graphs else None)


def idle(cache: PagedCache) -> bool:
    """Nothing held and nothing promised: the pool is as it was at the start."""
    cache.allocator.check()
    return cache.allocator.num_free == cache.pool.num_blocks and cache.promised == 0


@settings(max_examples=30)
@given(data=st.data())
def test_any_leaving_order_gives_the_naive_logits_and_frees_everything(data):
    token = st.integers(0, CONFIG.vocab_size - 1)
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=20), min_size=1, max_size=4))
    requests = [request(p) for p in prompts]
    paged, naive = runner(12), NaiveRunner(MODEL)
    paged.start(requests)
    logits = torch.cat([paged.forward([r]) for r in requests])
    running = list(requests)
    for _ in range(5):
        torch.testing.assert_close(logits, naive.forward(running), atol=1e-4, rtol=1e-4)
        for r, t in zip(running, data.draw(st.lists(token, min_size=len(running), max_size=len(running)))):
            r.output_token_ids.append(t)
        for r in data.draw(st.lists(st.sampled_from(running), unique_by=id)):
            paged.finish(r)
            running.remove(r)
        running = data.draw(st.permutations(running))
        if not running:
            break
        logits = paged.forward(running)
        assert all(len(r.block_ids) == -(-r.num_tokens // BLOCK) for r in running), "a block too many or too few"
    for r in running:
        paged.finish(r)
    assert idle(paged.cache)


def test_a_thousand_mixed_requests_leave_the_pool_as_it_was():
    """On the cache alone: groups of drawn sizes, each request ending at a drawn length."""
    cache, draw = PagedCache(KVPool(CONFIG, 40, BLOCK, torch.float32)), random.Random(0)
    done = 0
    while done < 1000:
        group = [request([1] * draw.randint(1, 40), draw.randint(1, 40)) for _ in range(draw.randint(1, 8))]
        cache.promise(group)
        running = list(group)
        while running:
            for r in list(running):
                cache.grow(r)
                r.output_token_ids.append(1)
                if len(r.output_token_ids) == r.max_tokens or draw.random() < 0.1:
                    cache.release(r)
                    running.remove(r)
                    done += 1
            held = cache.pool.num_blocks - cache.allocator.num_free
            assert held == sum(len(r.block_ids) for r in running)
    assert idle(cache)


def test_a_request_never_needs_more_than_was_promised():
    """prompt + max_tokens - 1 tokens are computed: the last one never is."""
    cache = PagedCache(KVPool(CONFIG, 2, BLOCK, torch.float32))
    r = request([1] * 16, max_tokens=17)
    cache.promise([r])
    assert cache.available() == 0
    with pytest.raises(MinillmError, match="finish or close the streams"):
        cache.promise([request([1])])
    for _ in range(r.max_tokens):
        cache.grow(r)
        r.output_token_ids.append(1)
    assert len(r.block_ids) == 2
    cache.release(r)
    assert idle(cache)


# The whole engine --------------------------------------------------------------------------------------

PROMPTS = ["The capital of France is", "Once upon a time, in a village", "def fibonacci(n):", "1, 2, 3,"]


@pytest.fixture(scope="module")
def paged_llm(embedded_folder):
    return LLM(embedded_folder, dtype="float32", kv_cache="paged", num_kv_blocks=24, max_model_len=256)


@pytest.mark.model
def test_greedy_tokens_equal_the_contiguous_engines(llm, paged_llm):
    params = SamplingParams(temperature=0, max_tokens=20)
    want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    got = [o.outputs[0].token_ids for o in paged_llm.generate(PROMPTS, params, use_tqdm=False)]
    assert got == want
    assert idle(paged_llm.engine.cache)


@pytest.mark.model
def test_more_requests_than_blocks_run_in_groups_in_order(llm, paged_llm):
    params = [SamplingParams(temperature=0, max_tokens=3 + 5 * (i % 4), ignore_eos=True) for i in range(10)]
    prompts = [PROMPTS[i % 4] for i in range(10)]
    want = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    assert [o.outputs[0].token_ids for o in paged_llm.generate(prompts, params, use_tqdm=False)] == want
    assert idle(paged_llm.engine.cache)


@pytest.mark.model
def test_an_abandoned_stream_frees_its_blocks_at_every_step(paged_llm):
    cache = paged_llm.engine.cache
    for steps in range(4):
        stream = paged_llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        for _ in range(steps):
            next(stream)
        stream.close()
        assert idle(cache)


@pytest.mark.model
def test_streams_that_do_not_fit_together_take_turns(paged_llm):
    """Preempted and computed again, in other company, a token may fall to the other side of a tie in the last bit:
    after a while the texts may differ. In the batch-invariant mode they do not (test_batch_invariant.py).
    """
    cache = paged_llm.engine.cache
    long = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)  # 16 of the 24 blocks
    prompts = ["Once upon a time", "1, 2, 3,"]
    alone = ["".join(paged_llm.stream(p, long)) for p in prompts]
    paged_llm.engine.events.clear()
    streams, texts = [paged_llm.stream(p, long) for p in prompts], ["", ""]
    for pair in itertools.zip_longest(*streams, fillvalue=""):
        texts = [t + piece for t, piece in zip(texts, pair, strict=True)]
    assert [t[:60] for t in texts] == [t[:60] for t in alone]
    assert [e.data["output_tokens"] for e in paged_llm.engine.events.of("finished")] == [250, 248]  # the context ends
    assert paged_llm.engine.events.of("preempted")
    assert idle(cache)


@pytest.mark.model
def test_a_failing_step_frees_everything_and_the_engine_goes_on(paged_llm, monkeypatch):
    engine, calls = paged_llm.engine, []

    def fails(*args):
        calls.append(1)
        if len(calls) == 40:
            raise RuntimeError("the device is on fire")
        return PagedSDPA.forward(engine.runner.attention, *args)

    monkeypatch.setattr(engine.runner.attention, "forward", fails, raising=False)
    with pytest.raises(RuntimeError, match="on fire"):
        paged_llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert idle(engine.cache)
    monkeypatch.undo()
    assert paged_llm.generate("2 + 2 =", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)


@pytest.mark.model
def test_what_can_never_fit_is_refused_at_the_door(paged_llm):
    small = LLM(
        paged_llm.engine.tokenizer.folder, dtype="float32", kv_cache="paged", num_kv_blocks=2, max_model_len=256
    )
    with pytest.raises(RequestError, match="may need 4 blocks of KV cache, and there are 2"):
        small.generate([[1, 2, 3]], SamplingParams(max_tokens=60), use_tqdm=False)
    assert small.generate([[1, 2, 3]], SamplingParams(max_tokens=30, temperature=0), use_tqdm=False)


@pytest.mark.model
def test_own_parts_are_called(embedded_folder, paged_llm):
    class MyAllocator(BlockAllocator):
        handed = 0

        def allocate(self, n):
            type(self).handed += n
            return super().allocate(n)

    class MyAttention(PagedSDPA):
        steps = 0

        def plan(self, batch):
            type(self).steps += 1
            return super().plan(batch)

    parts = {"allocator": MyAllocator, "attention": MyAttention}
    mine = LLM(embedded_folder, dtype="float32", kv_cache="paged", num_kv_blocks=8, max_model_len=64, parts=parts)
    params = SamplingParams(temperature=0, max_tokens=5)
    want = paged_llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids
    assert mine.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids == want
    assert MyAllocator.handed == 1
    assert MyAttention.steps == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache": "paged", "block_size": 24}, "block_size must be one of 16, 32"),
        ({"kv_cache": "paged", "block_size": 16.0}, "block_size must be one of 16, 32"),
        ({"kv_cache": "paged", "attention_backend": "flash"}, "attention_backend 'flash' is not known"),
        ({"kv_cache": "paged", "kv_cache_dtype": "int4"}, "kv_cache_dtype 'int4' is not known"),
        ({"kv_cache": "paged", "num_kv_blocks": 0}, "num_kv_blocks must be a positive whole number"),
        ({"kv_cache": "paged", "enforce_eager": "yes"}, "enforce_eager must be True or False"),
        ({"kv_cache": "contiguous", "kv_cache_dtype": "int8"}, "kv_cache_dtype belongs to kv_cache='paged'"),
        ({"kv_cache": "contiguous", "block_size": 32}, "block_size belongs to kv_cache='paged'"),
        ({"kv_cache": "none", "attention_backend": "torch"}, "with 'none' it would be ignored"),
        ({"quantization": "int3"}, "quantization 'int3' is not known"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, words):
    with pytest.raises(MinillmError) as caught:
        EngineConfig(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("kv_cache", "part"),
    [("none", "kv_cache"), ("paged", "kv_cache"), ("contiguous", "allocator"), ("none", "attention")],
)
def test_a_part_that_would_never_be_called_is_refused(embedded_folder, kv_cache, part):
    with pytest.raises(MinillmError, match=f"{part} belongs to kv_cache="):
        LLM(embedded_folder, kv_cache=kv_cache, max_model_len=64, parts={part: BlockAllocator})


def test_pool_bytes_are_the_formula():
    for kv_dtype, itemsize in (("auto", 4), ("int8", 1), ("fp8", 1)):
        pool = KVPool(CONFIG, 5, BLOCK, torch.float32, kv_dtype)
        assert pool.nbytes == 6 * block_bytes(CONFIG, BLOCK, itemsize, kv_dtype)  # five, and the padding block


# Graphs, with recording and replaying done by hand ------------------------------------------------------


class ByHand:
    """A capture for the CPU: a replay runs the step again and copies the result to where the first one lay."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, step):
        self.captured += 1
        out = step()

        def replay():
            self.replayed += 1
            out.copy_(step())

        return replay, out


def triton_model() -> Transformer:
    model = Transformer(CONFIG, random_weights(CONFIG, std=0.1))
    model.ops = TritonOps()
    return model


def test_replayed_steps_equal_eager_ones_whatever_the_batch():
    capture = ByHand()
    options = {"max_rows": 4, "capture": capture, "pays": lambda eager, replay: True}
    graphed = runner(20, True, TritonAttention, triton_model(), **options)
    eager = runner(20)
    groups = [[request([1 + i] * n) for i, n in enumerate((3, 16, 5))] for _ in range(2)]
    for side, group in zip((graphed, eager), groups):
        side.start(group)
        for r in group:
            side.forward([r])
    for keep in (3, 3, 2, 2, 1):
        for side, group in zip((graphed, eager), groups):
            for r in group[keep:]:
                side.finish(r)
            del group[keep:]
            for r in group:
                r.output_token_ids.append(7)
        torch.testing.assert_close(graphed.forward(groups[0]), eager.forward(groups[1]), atol=1e-4, rtol=1e-4)
    assert capture.captured == 3  # buckets 4, 2 and 1
    assert capture.replayed == 5
    assert not graphed.cache.pool.k[:, 0].any(), "the padding block was written"
    for r in groups[0]:
        graphed.finish(r)
    assert idle(graphed.cache)


def test_a_graph_is_recorded_and_replayed_on_the_models_own_device(monkeypatch):
    """Streams, events and launches go to the current device, which need not be the one of a model on cuda:1."""
    current, seen = [], []

    @contextlib.contextmanager
    def on(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr("minillm.graphs.on", on)
    by_hand = ByHand()

    def capture(step):
        seen.append(list(current))
        replay, out = by_hand(step)
        return lambda: (seen.append(list(current)), replay()), out

    pays = lambda eager, replay: bool(seen.append(list(current))) or True
    graphed = runner(20, True, TritonAttention, triton_model(), max_rows=1, capture=capture, pays=pays)
    r = request([1])
    graphed.start([r])
    graphed.forward([r])
    assert seen == [[MODEL.device]] * 3  # recorded, judged, replayed
    assert not current


def test_on_a_cpu_there_is_no_device_to_make_current():
    with on(torch.device("cpu")):
        pass
    assert on(torch.device("cuda", 1)).idx == 1


def test_a_table_with_blocks_to_spare_fits_the_buffers_of_a_graph():
    """A block table may be longer than its tokens need: blocks taken ahead, or a context just below its bucket."""
    options = {"max_rows": 2, "capture": ByHand(), "pays": lambda eager, replay: True}
    graphed = runner(20, True, TritonAttention, triton_model(), **options)
    graphed.graphs.contexts = [32, 96]
    r = request([1, 2, 3])
    graphed.start([r])
    want = graphed.forward([r])
    r.output_token_ids.append(7)
    graphed.cache.grow(r)
    batch = Batch.build([Row(0, 3, 1, [*r.block_ids, 11, 12])], [7])
    want = graphed.model.logits(graphed.model.forward(batch, graphed.attention))
    torch.testing.assert_close(graphed.graphs.run(batch), want, atol=1e-4, rtol=1e-4)


def test_padding_rows_that_write_are_noticed(monkeypatch):
    """The mutation: padding rows keep slot 0 instead of -1, so they write into the padding block."""
    import minillm.graphs as module

    fill = module.Buffers.fill

    def wrong(self, batch, plan):
        fill(self, batch, plan)
        self.plan.slots.clamp_(min=0)

    monkeypatch.setattr(module.Buffers, "fill", wrong)
    options = {"max_rows": 4, "capture": ByHand(), "pays": lambda eager, replay: True}
    graphed = runner(20, True, TritonAttention, triton_model(), **options)
    group = [request([1]), request([2]), request([3])]
    graphed.start(group)
    for r in group:
        graphed.forward([r])
        r.output_token_ids.append(7)
    graphed.forward(group)
    assert graphed.cache.pool.k[:, 0].any()


def test_a_graph_is_kept_only_where_it_pays():
    capture = ByHand()
    graphed = runner(20, True, TritonAttention, triton_model(), max_rows=4, capture=capture, pays=lambda e, r: False)
    r = request([1, 2, 3])
    graphed.start([r])
    for _ in range(3):
        graphed.forward([r])
        r.output_token_ids.append(7)
    assert (capture.captured, capture.replayed) == (1, 0)


def test_prompts_and_large_batches_run_eagerly():
    capture = ByHand()
    graphed = runner(20, True, TritonAttention, triton_model(), max_rows=1, capture=capture, pays=lambda e, r: True)
    group = [request([1, 2]), request([3])]
    graphed.start(group)
    for r in group:
        graphed.forward([r])
        r.output_token_ids.append(7)
    assert capture.captured == 1  # the second prompt has one token: that is a decode step, and may be captured
    graphed.forward(group)
    assert capture.captured == 1


@given(st.integers(1, 600))
def test_buckets_cover_every_batch_and_pad_little(largest):
    sizes = buckets(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for n in range(1, largest + 1):
        bucket = next(s for s in sizes if s >= n)
        assert bucket - n <= max(3, 15 if n > 48 else 7)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_come_from_one_division_rounded_once(dtype):
    """As in the kernel. torch takes number / tensor as number * (1 / tensor): some codes then fall the other way."""
    x = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0)).half().float()
    amax = x.abs().amax(-1)
    step = torch.from_numpy(np.float32(LARGEST[dtype]) / amax.numpy())
    scaled = x * step.unsqueeze(-1)
    want = (torch.floor(scaled + 0.5) if dtype == torch.int8 else scaled).to(dtype)
    stored, _ = quantize_kv(x, dtype)
    assert torch.equal(stored.float(), want.float())
    by_reciprocal = x * (amax.reciprocal() * LARGEST[dtype]).unsqueeze(-1)
    wrong = (torch.floor(by_reciprocal + 0.5) if dtype == torch.int8 else by_reciprocal).to(dtype)
    assert not torch.equal(wrong.float(), want.float()), "this input does not tell the two apart"
