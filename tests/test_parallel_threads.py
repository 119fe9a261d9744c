"""A model spread over ranks computes what one rank computes. Ranks are threads here, so that odd shapes are cheap."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from conftest import FAMILIES, tiny_hf
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.attention.causal import NoCacheAttention
from minillm.attention.paged import PagedReference
from minillm.attention.protocol import Batch, Row
from minillm.cache.pool import KVPool
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models.transformer import Transformer
from minillm.models.weights import load_weights
from minillm.parallel import linear, messages, shard
from minillm.parallel.executor import StageExecutor
from minillm.parallel.group import Alone, RankLost, run_threads
from minillm.parallel.linear import parallelise
from minillm.parallel.pool import ShardedPool, obey
from minillm.parallel.runner import cut
from minillm.parallel.shard import Place, local_config
from minillm.parallel.turn import Turns
from minillm.quant import quantize_model

WIDE = {"vocab_size": 212, "num_attention_heads": 8, "num_key_value_heads": 2}
TOLERANCE = 2e-5  # of fp32 logits, which are of order 1: sums in another order
PROMPTS = [[5, 9, 20, 33, 7], [100, 3, 211], [1], [4, 8, 15, 16, 23, 42, 108]]


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(f"wide-{family}")
            tiny_hf(family, **WIDE).save_pretrained(made[family])
        return made[family]

    return make


def tiny_config(family):
    return tiny_hf(family).config.to_dict()


def batch_of(prompts):
    return Batch.build([Row(i, 0, len(p)) for i, p in enumerate(prompts)], [t for p in prompts for t in p])


def model_of(folder, place, pack=False, scheme=None):
    whole = ModelConfig.from_folder(folder)
    weights = load_weights(folder, whole, torch.float32, place=place)
    model = Transformer(local_config(whole, place.tp, place.pp, place.stage), weights, pack=pack)
    return quantize_model(model, scheme) if scheme else model


def logits(model):
    batch = batch_of(PROMPTS)
    return model.logits(model.forward(batch, NoCacheAttention())[batch.last])


def spread_logits(folder, tp, **options):
    """Of every rank."""

    def work(group):
        place = Place(group.rank, tp)
        return logits(parallelise(model_of(folder, place, **options), group, place))

    return run_threads(tp, work)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_at_2_and_4(wide_folder, family, tp):
    """At 4 its two KV heads are replicated."""
    want = logits(model_of(wide_folder(family), Place()))
    found = spread_logits(wide_folder(family), tp)
    assert all((x - want).abs().max() < TOLERANCE * want.abs().max() for x in found)
    assert all(torch.equal(x, found[0]) for x in found)  # whoever draws, draws from the same


def test_packed_weights_are_the_same(wide_folder):
    want = logits(model_of(wide_folder("llama-bias"), Place(), pack=True))
    assert (spread_logits(wide_folder("llama-bias"), 2, pack=True)[0] - want).abs().max() < TOLERANCE * want.abs().max()


def test_quantised_shards_are_as_good_as_a_quantised_whole(wide_folder):
    """Scales are a shard's own, so the numbers differ; their error is of one size."""
    folder = wide_folder("llama")
    exact = logits(model_of(folder, Place()))
    whole = (logits(model_of(folder, Place(), scheme="int8")) - exact).norm()
    spread = (spread_logits(folder, 2, scheme="int8")[0] - exact).norm()
    assert 0 < spread < 1.5 * whole < 0.5 * exact.norm()


# Deliberate mistakes exceed the tolerance -----------------------------------------------------------------------


class NoAllReduce(linear.RowParallelLinear):
    def __call__(self, x):
        return self.linear(x)


class SumsTheNeighbours(linear.VocabParallelHead):
    """The parts in another order."""

    def __call__(self, hidden):
        return torch.cat(self.group.all_gather(self.linear(hidden))[::-1], dim=-1)


class EmbedsEverywhere(linear.VocabParallelEmbedding):
    def __call__(self, ids):
        rows = torch.nn.functional.embedding((ids - self.start).clamp(0, len(self.table) - 1), self.table)
        return self.group.all_reduce(rows)


def wrong_columns(config, place, name, shape):
    cut = ORIGINAL(config, place, name, shape)
    return ORIGINAL(config, Place(place.tp - 1 - place.tp_rank, place.tp), name, shape) if "down_proj" in name else cut


def bias_everywhere(config, place, name, shape):
    return (slice(None),) if name.endswith("o_proj.bias") else ORIGINAL(config, place, name, shape)


ORIGINAL = shard._cut


@pytest.mark.parametrize(
    ("module", "name", "mutant"),
    [
        (linear, "RowParallelLinear", NoAllReduce), (linear, "VocabParallelHead", SumsTheNeighbours),
        (linear, "VocabParallelEmbedding", EmbedsEverywhere), (shard, "_cut", wrong_columns),
        (shard, "_cut", bias_everywhere),
    ],
    ids=["missing all-reduce", "wrong vocabulary order", "every rank embeds", "wrong shard", "bias on each rank"],
)  # fmt: skip
def test_a_mistake_exceeds_the_tolerance(wide_folder, monkeypatch, module, name, mutant):
    want = logits(model_of(wide_folder("llama-bias"), Place()))
    monkeypatch.setattr(module, name, mutant)
    found = spread_logits(wide_folder("llama-bias"), 2)[0]
    assert (found - want).abs().max() > 100 * TOLERANCE * want.abs().max()


# Stages and micro-batches ----------------------------------------------------------------------------------------


class Layered:
    """Whatever was left out of a pool's way: a backend over one rank's pool."""

    def __new__(cls, model, blocks=16):
        pool = KVPool(model.config, blocks, 16, model.dtype)
        return PagedReference(pool), pool


def paged_rows(prompts):
    return [Row(i, 0, len(p), [2 * i + 2, 2 * i + 1]) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the second's head is its embedding
def test_stages_with_micro_batches(wide_folder, family, stages, micro_batches):
    folder, tokens = wide_folder(family), [t for p in PROMPTS for t in p]
    want = logits(model_of(folder, Place()))[[0, 2, 3]]

    def work(group):
        place = Place(0, 1, group.rank, stages)
        model = parallelise(model_of(folder, place), Alone(), place)
        parts, _ = cut(paged_rows(PROMPTS), tokens, [0, 2, 3], micro_batches, model.device)
        assert len(parts) == micro_batches
        return StageExecutor(model, Layered(model)[0], group, place).step(parts)

    first, *middle, last = run_threads(stages, work, rendezvous=True)  # nor does anybody wait for who waits for it
    assert torch.equal(first, last)
    assert all(m is None for m in middle)
    assert (first - want).abs().max() < TOLERANCE * want.abs().max()


class AnswersAtOnce(StageExecutor):
    """The last stage sends each micro-batch's logits before it receives the next hidden states."""

    def step(self, micro_batches):
        for m in micro_batches:
            out = self._compute(m.batch)
            self.world.send(self._logits(out, m) if self.place.last else out, 1 - self.place.rank)
        if self.place.last:
            return None
        return torch.cat([self.world.recv(self._empty(len(m.ready), 212), 1) for m in micro_batches])


@pytest.mark.parametrize("rendezvous", [False, True])
def test_logits_that_come_too_early_stand_in_the_way(wide_folder, rendezvous):
    """Where a send waits for its receiver, both ranks would send and neither receive."""
    folder, tokens = wide_folder("llama"), [t for p in PROMPTS for t in p]

    def work(group):
        place = Place(0, 1, group.rank, 2)
        model = parallelise(model_of(folder, place), Alone(), place)
        parts, _ = cut(paged_rows(PROMPTS), tokens, [0, 1, 2, 3], 2, model.device)
        return AnswersAtOnce(model, Layered(model)[0], group, place).step(parts)

    if not rendezvous:
        assert len(run_threads(2, work)[0]) == 4
        return
    with pytest.raises(RankLost, match="does not take what rank"):
        run_threads(2, work, timeout_s=1.0, rendezvous=True)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 4), (3, 4), (4, 4)])
def test_the_bubble_of_the_executor_itself(stages, micro_batches):
    """On clocks that only count work: every stage takes 1 a micro-batch, and a message carries its sender's time."""

    class Clocked:
        """A group whose messages bring the receiver's clock to the sender's."""

        def __init__(self, group):
            self.group, self.rank, self.size, self.now, self.busy = group, group.rank, group.size, 0.0, 0.0

        def send(self, x, to):
            self.group.send(torch.tensor([self.now]), to)
            self.group.send(x, to)

        def recv(self, x, source):
            sent = self.group.recv(torch.zeros(1), source)
            self.now = max(self.now, float(sent))
            return self.group.recv(x, source)

        def flush(self):
            pass

    class Stub:
        dtype, device = torch.float32, torch.device("cpu")
        config = ModelConfig.from_hf(tiny_config("llama"))

        def __init__(self, world):
            self.world = world

        def compute(self, ids, positions, attention, plan, hidden):
            self.world.now, self.world.busy = self.world.now + 1, self.world.busy + 1
            return torch.zeros(len(ids), self.config.hidden_size)

        def logits(self, hidden):
            return torch.zeros(len(hidden), self.config.vocab_size)

    def work(group):
        world = Clocked(group)
        parts, _ = cut(paged_rows([[1]] * micro_batches), [1] * micro_batches, [0], micro_batches, Stub.device)
        plans = type("Plans", (), {"plan": lambda self, batch: None})()
        StageExecutor(Stub(world), plans, world, Place(0, 1, group.rank, stages)).step(parts)
        return world.now, world.busy

    times = run_threads(stages, work)
    makespan, busy = max(now for now, _ in times), sum(b for _, b in times)
    assert 1 - busy / (stages * makespan) == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 6), st.data())
@settings(max_examples=200, deadline=None)
def test_micro_batches_are_the_rows_in_order(counts, most, data):
    rows = [Row(i, 3 * i, n, [i + 1] * 9) for i, n in enumerate(counts)]
    tokens = list(range(sum(counts)))
    ready = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1))))
    parts, ids = cut(rows, tokens, ready, most, torch.device("cpu"))
    assert len(parts) == min(most, len(rows))
    assert [(r.start, r.num_new, r.blocks) for m in parts for r in m.batch.rows] == [tuple(r[1:]) for r in rows]
    assert [t for part in ids for t in part] == tokens == torch.cat([m.batch.token_ids for m in parts]).tolist()
    starts, at = [], 0
    for m in parts:
        starts.append(at)
        at += len(m.batch.rows)
    assert [start + i for start, m in zip(starts, parts, strict=True) for i in m.ready] == ready
    assert all(m.batch.rows for m in parts)


# What rank 0 tells ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 30), st.integers(0, 70)), min_size=1, max_size=40),
    st.data(),
)
@settings(max_examples=100, deadline=None)
def test_a_step_arrives_as_it_was_told(shapes, data):
    """Also one that does not fit into the first message."""
    rows = [Row(i, start, n, list(range(blocks))) for i, (start, n, blocks) in enumerate(shapes)]
    tokens = [data.draw(st.integers(0, 49151)) for _ in range(sum(r.num_new for r in rows))]
    parts, ids = cut(rows, tokens, list(range(0, len(rows), 2)), 3, torch.device("cpu"))
    numbers = messages.encode(parts, ids)

    def work(group):
        if group.rank == 0:
            messages.tell(group, numbers)
            return parts
        kind, *rest = messages.hear(group)
        assert kind == messages.STEP
        return messages.decode(rest, torch.device("cpu"))

    told, heard = run_threads(2, work)
    for a, b in zip(told, heard, strict=True):
        assert [(r[:3], list(r.blocks)) for r in a.batch.rows] == [(r[:3], list(r.blocks)) for r in b.batch.rows]
        assert a.ready == b.ready
        for x in ("token_ids", "positions", "last"):
            assert torch.equal(getattr(a.batch, x), getattr(b.batch, x))


# One pool of many -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_block_is_whole_whoever_holds_it(wide_folder, tp, pp, kv_dtype):
    """Written whole through rank 0, then read back; each rank has exactly its layers and heads of it."""
    config = ModelConfig.from_folder(wide_folder("llama"))
    full = KVPool(config, 6, 16, torch.float32, kv_dtype)
    for t in full._stored:
        t.copy_(torch.randn(t.shape).mul(20).to(t.dtype) if t.is_floating_point() else torch.randint(0, 120, t.shape))
    want = full.read_blocks([3, 5])

    def work(group):
        place = Place.of_rank(group.rank, tp, pp)
        local = local_config(config, tp, pp, place.stage)
        pool = KVPool(local, 6, 16, torch.float32, kv_dtype)
        if group.rank == 0:
            whole = ShardedPool(pool, config, group, place, Turns(lambda error: error))
            assert whole.block_layout == full.block_layout
            whole.write_blocks([2, 6], want)
            assert whole.read_blocks([]) == []
            with pytest.raises(MinillmError, match="this is no block of this pool"):
                whole.write_blocks([1], [[t[:1] for t in want[0]]])
            got = whole.read_blocks([6, 2])
            messages.tell(group, [messages.END])
        else:
            got = None
            while (numbers := messages.hear(group))[0] != messages.END:
                obey(numbers, pool, config, group, place)
        layers = shard.stage_layers(config.num_layers, pp, place.stage)
        heads = shard.kv_heads(config, place)
        for mine, theirs in zip(pool.read_block(2), want[0], strict=True):
            assert torch.equal(mine, theirs[layers.start : layers.stop, :, heads.start : heads.stop])
        return got

    got = run_threads(tp * pp, work)[0]
    for a, b in zip(got, want[::-1], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# A world of threads -----------------------------------------------------------------------------------------------


def test_a_rank_that_leaves_is_told_and_nobody_hangs():
    def work(group):
        if group.rank == 1:
            raise ValueError("tired")
        return group.all_reduce(torch.ones(3))

    with pytest.raises(ValueError, match="tired"):
        run_threads(3, work)

    def left_out(group):
        return group.rank == 1 or group.all_reduce(torch.ones(3))

    with pytest.raises(RankLost, match="rank . waited in vain"):
        run_threads(3, left_out, timeout_s=0.2)


def test_shapes_that_differ_are_told():
    with pytest.raises(MinillmError, match=r"one shape and dtype on all ranks, got \[1\].*\[2\]"):
        run_threads(2, lambda g: g.all_reduce(torch.ones(g.rank + 1)))


def test_what_is_said_is_counted():
    def work(group):
        group.all_reduce(torch.ones(8))
        group.all_gather(torch.ones(2))
        return group.traffic

    for traffic in run_threads(2, work):
        assert dict(traffic.calls) == {"all_reduce": 1, "all_gather": 1}
        assert dict(traffic.bytes) == {"all_reduce": 32, "all_gather": 8}


def test_two_all_reduces_a_layer(wide_folder):
    def work(group):
        place = Place(group.rank, 2)
        model = parallelise(model_of(wide_folder("llama"), place), group, place)
        logits(model)
        return dict(group.traffic.calls), dict(group.traffic.bytes), model.config.hidden_size

    calls, sizes, hidden = run_threads(2, work)[1]
    tokens = sum(map(len, PROMPTS))
    assert calls == {"all_reduce": 2 * 3 + 1, "all_gather": 1}  # three layers; the embedding; the head
    assert sizes["all_reduce"] == 7 * tokens * hidden * 4


# A turn ends as it began ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_comes_when_the_exchange_has_ended():
    turns, done = Turns(lambda error: error), []

    def exchange():
        with turns():
            signal.raise_signal(signal.SIGINT)  # Ctrl+C
            done.append("the step is whole")

    with pytest.raises(KeyboardInterrupt):
        exchange()
    assert done
    assert turns.broken is None
    with turns():  # the ranks are in step: another one can follow
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_interrupt_breaks_it_off_and_nothing_follows():
    turns = Turns(lambda error: error)

    def exchange():
        with turns():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        exchange()
    with pytest.raises(RankLost, match=r"left a step .*KeyboardInterrupt.*make a new engine"), turns():
        raise AssertionError("nobody comes here")


def test_what_fails_in_an_exchange_ends_the_engine_with_its_reason():
    turns = Turns(lambda error: RankLost("rank 2 was killed"))
    with pytest.raises(RankLost, match="rank 2 was killed"), turns():
        raise RankLost("connection closed")
    other = Turns(lambda error: error)
    with pytest.raises(RankLost, match="MemoryError: no more"), other():
        raise MemoryError("no more")
    with pytest.raises(RankLost, match="MemoryError: no more"), other():
        pass


def test_what_was_computed_while_a_rank_was_lost_counts_for_nothing():
    """NCCL does not raise: an abort ends what runs, and leaves rubbish in its place."""
    lost = []
    turns = Turns(lambda error: error, lambda: lost[0] if lost else None)
    with turns():
        pass
    with pytest.raises(RankLost, match="rank 1 was ended"), turns():
        lost.append(RankLost("rank 1 was ended"))
    with pytest.raises(RankLost, match="rank 1 was ended"), turns():
        raise AssertionError("nobody comes here")


def test_what_an_abort_lets_fail_is_not_the_reason():
    """After it torch.distributed has no group any more, which it says with a ValueError."""
    turns = Turns(lambda error: error, lambda: RankLost("rank 1 was ended"))
    with pytest.raises(RankLost, match="rank 1 was ended"), turns():
        raise ValueError("Default process group has not been initialized")


@pytest.mark.usefixtures("ctrl_c")
def test_in_another_thread_signals_are_left_alone():
    seen = []

    def work():
        with Turns(lambda error: error)():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
