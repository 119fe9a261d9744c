"""Faults in a learner's allocator or attention, and interrupts: an error that names the part, and no block lost."""

from __future__ import annotations

import gc
import itertools
import shutil

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import LLM, MinillmError, SamplingParams
from minillm.attention.paged import PagedSDPA
from minillm.attention.triton import TritonAttention
from minillm.cache.blocks import BlockAllocator
from minillm.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [[5, 6], [7] * 20, [8]]


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """A random Qwen3 (heads of 16, which the kernels can do) of 211 words."""
    folder = tmp_path_factory.mktemp("parts") / "model"
    shutil.copytree(tiny_folder("qwen3"), folder)
    Backend(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def paged(folder):
    def make(**options):
        small = {"kv_cache": "paged", "num_kv_blocks": 8, "max_model_len": 64, "dtype": "float32"}
        return LLM(folder, **(small | options))

    return make


def ids(llm, prompts=PROMPTS, params=GREEDY):
    return [o.token_ids for r in llm.generate(prompts, params, use_tqdm=False) for o in r.outputs]


def idle(llm) -> bool:
    cache = llm.engine.cache
    cache.allocator.check()
    return cache.allocator.num_free == cache.pool.num_blocks and cache.promised == 0


def giving(answer):
    """An allocator whose second answer is answer(ids, all ids given before)."""

    class Mine(BlockAllocator):
        calls, before = 0, ()

        def allocate(self, n):
            given, self.calls = super().allocate(n), self.calls + 1
            before, self.before = self.before, (*self.before, *given)
            return given if self.calls == 1 else answer(given, before)

    return Mine


@pytest.mark.parametrize(
    "answer",
    [
        lambda ids, before: [before[0]] * len(ids),
        lambda ids, before: ids[:1] * len(ids),
        lambda ids, before: ids[:-1],
        lambda ids, before: [],
        lambda ids, before: [*ids, 8],
        lambda ids, before: [0, *ids[1:]],
        lambda ids, before: [-1, *ids[1:]],
        lambda ids, before: [9, *ids[1:]],
        lambda ids, before: [10**30, *ids[1:]],
        lambda ids, before: [float(i) for i in ids],
        lambda ids, before: [str(i) for i in ids],
        lambda ids, before: ids[0],
        lambda ids, before: None,
    ],
)
def test_blocks_that_an_allocator_must_not_give(paged, answer):
    llm = paged(parts={"allocator": giving(answer)})
    stream = llm.stream([9, 9], GREEDY)  # holds a block that must not be given to another
    next(stream)
    with pytest.raises(MinillmError, match="parts: the allocator"):
        ids(llm, [[7] * 20])
    rest = "".join(stream)
    good = paged()
    whole = "".join(good.stream([9, 9], GREEDY))
    assert whole.endswith(rest)
    assert rest


@pytest.mark.parametrize("answer", [lambda ids, before: ids[:-1], lambda ids, before: [*ids[:-1], 0]])
def test_what_an_allocator_gave_in_part_is_given_back(paged, answer):
    llm = paged(parts={"allocator": giving(answer)})
    ids(llm, [[5]])
    with pytest.raises(MinillmError, match="parts: the allocator was asked for 2 blocks"):
        ids(llm, [[7] * 20])
    assert llm.engine.cache.allocator.num_free == 7  # the one it kept to itself
    assert llm.engine.cache.promised == 0


def test_any_iterable_of_whole_numbers_is_fine(paged):
    for form in (iter, tuple, torch.tensor, dict.fromkeys):
        llm = paged(parts={"allocator": giving(lambda ids, before, form=form: form(ids))})
        assert ids(llm) == ids(paged())
        assert idle(llm)


class NoNumber(BlockAllocator):
    num_free = None


class Method(BlockAllocator):
    def num_free(self):
        return self.num_blocks


class NoFree:
    num_free = 8

    def __init__(self, num_blocks):
        pass

    def allocate(self, n):
        return list(range(1, n + 1))


class Unwilling(BlockAllocator):
    def __init__(self):
        super().__init__(8)


class NoForward:
    def __init__(self, pool):
        pass

    plan = write = lambda self, *_: None


@pytest.mark.parametrize(
    ("part", "kind", "words"),
    [
        ("allocator", NoNumber, "num_free must be a number"),
        ("allocator", Method, r"num_free must be a number \(a property\)"),
        ("allocator", NoFree, "needs a method free"),
        ("allocator", Unwilling, "allocator is called with the number of blocks"),
        ("allocator", lambda num_blocks: None, "needs a method allocate"),
        ("attention", NoForward, "attention needs a method forward"),
        ("attention", lambda pool: None, "attention needs a method plan"),
        ("attention", lambda: None, "attention is called with the KVPool"),
        ("attention", object(), "attention must be a class"),
    ],
)
def test_parts_of_the_wrong_form_are_refused_at_the_door(paged, part, kind, words):
    with pytest.raises(MinillmError, match=f"parts: .*{words}"):
        paged(parts={part: kind})


def test_an_exercise_that_is_not_attempted_says_so(paged):
    class Later:
        def __init__(self, num_blocks):
            raise NotImplementedError("task 06.2 is not attempted yet")

    with pytest.raises(NotImplementedError, match=r"06\.2"):
        paged(parts={"allocator": Later})


def test_lost_blocks_are_named_as_such(paged):
    class Leaky(BlockAllocator):
        def free(self, ids):
            pass

    llm = paged(parts={"allocator": Leaky})
    ids(llm)  # four blocks
    ids(llm)  # and four more
    with pytest.raises(MinillmError, match=r"parts: the allocator says that 0 blocks are free; 0 of 8 are held"):
        ids(llm)


@pytest.mark.parametrize("fails_at", range(1, 5))
def test_a_free_that_fails_takes_nobody_else_along(paged, fails_at):
    class Fails(BlockAllocator):
        calls = 0

        def free(self, ids):
            super().free(ids)
            self.calls += 1
            if self.calls == fails_at:
                raise ValueError("free is broken")

    llm = paged(parts={"allocator": Fails})
    if fails_at <= len(PROMPTS):
        with pytest.raises(ValueError, match="free is broken"):
            ids(llm)
    else:
        ids(llm)
    assert idle(llm)


def attention(change, base=PagedSDPA, method="forward"):
    class Mine(base):
        pass

    setattr(Mine, method, lambda self, *args: change(getattr(base, method)(self, *args)))
    return Mine


@pytest.mark.parametrize(
    "change",
    [
        lambda out: None, lambda out: out.flatten(1), lambda out: out.transpose(1, 2), lambda out: out[:1],
        lambda out: out.double(), lambda out: out.numpy(), lambda out: (out, out), lambda out: out.to("meta"),
    ],
)  # fmt: skip
def test_what_attention_must_not_return(paged, change):
    llm = paged(parts={"attention": attention(change)})
    with pytest.raises(MinillmError, match=r"parts: attention's forward must return \[\d+, 6, 16\] float32 on cpu"):
        ids(llm)
    assert idle(llm)


def test_a_fused_backend_of_ones_own_is_called_and_judged(paged):
    assert ids(paged(parts={"attention": TritonAttention})) == ids(paged())
    wrong = attention(lambda q: q[:, :2], TritonAttention, "rope_write")
    with pytest.raises(MinillmError, match=r"parts: attention's rope_write must return q, \[\d+, 6, 16\]"):
        ids(paged(parts={"attention": wrong}))


def test_attention_of_nan_ends_the_request_in_words(paged):
    llm = paged(parts={"attention": attention(lambda out: out * torch.nan)})
    (result,) = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert result.outputs[0].finish_reason == "error"
    assert "NaN" in result.outputs[0].stop_reason
    assert idle(llm)


def test_a_backend_beside_an_own_one_would_be_ignored(paged):
    with pytest.raises(MinillmError, match="attention takes the place of attention_backend='reference'"):
        paged(attention_backend="reference", parts={"attention": PagedSDPA})


# Interrupts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", range(1, 13))
def test_an_interrupt_in_the_model_frees_everything(paged, call):
    """A step of three prompts and three decode steps, three layers each: every one of the twelve calls."""
    calls = itertools.count(1)

    def interrupt(out):
        if next(calls) == call:
            raise KeyboardInterrupt
        return out

    llm = paged(parts={"attention": attention(interrupt)})
    with pytest.raises(KeyboardInterrupt):
        ids(llm)
    assert idle(llm)
    assert ids(llm) == ids(paged())


@pytest.mark.parametrize("step", range(1, 5))
def test_an_interrupt_outside_the_run_frees_everything_while_it_is_still_looked_at(paged, step, monkeypatch):
    """A notebook keeps the last traceback, and with it every frame: the run must not wait for its collection."""
    llm = paged()
    run = llm.engine.run

    class Interrupted(list):
        def __iter__(self):
            raise KeyboardInterrupt

    def steps(requests):
        with_interrupt = run(requests)
        try:
            for i, s in enumerate(with_interrupt, start=1):
                yield Interrupted(s) if i == step else s
        finally:
            with_interrupt.close()

    monkeypatch.setattr(llm.engine, "run", steps)
    for work in (lambda: ids(llm), lambda: list(llm.stream([5], GREEDY))):
        with pytest.raises(KeyboardInterrupt) as kept:
            work()
        assert kept.traceback
        assert idle(llm)


def test_an_interrupt_at_the_start_of_a_group_keeps_no_promise(paged, monkeypatch):
    llm = paged(batching="static")
    promise = llm.engine.cache.promise

    def interrupted(requests):
        promise(requests)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.cache, "promise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ids(llm)
    assert idle(llm)


def test_streams_collected_in_any_order_leave_the_pool_as_it_was(paged):
    llm = paged()
    for order in itertools.permutations(range(3)):
        streams = {i: llm.stream(p, GREEDY) for i, p in enumerate(PROMPTS)}
        for steps, i in enumerate(order):
            for _ in range(steps):
                next(streams[i])
        for i in order:
            del streams[i]
        gc.collect()
        assert idle(llm)


# Small pools --------------------------------------------------------------------------------------------


def test_a_pool_of_one_block(paged):
    llm = paged(num_kv_blocks=1)
    prompts = [[5, 6], [7] * 13, [8] * 16]
    params = [GREEDY, GREEDY, GREEDY.replace(max_tokens=1)]
    assert ids(llm, prompts, params) == ids(paged(), prompts, params)
    assert idle(llm)
    with pytest.raises(RequestError, match="may need 2 blocks of KV cache, and there are 1"):
        ids(llm, [[5], [8] * 16], GREEDY.replace(max_tokens=2))
    assert idle(llm)


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1}, {"max_model_len": 7}, {"block_size": 256}, {"num_kv_blocks": 2}]
)
def test_corners_of_the_options_give_the_same_tokens(paged, options):
    prompts = [[5, 6], [7] * 4, [8], [9] * 3]
    for n in (1, 3):
        params = GREEDY.replace(n=n, max_tokens=3)
        llm = paged(**options)
        assert ids(llm, prompts, params) == ids(paged(), prompts, params)
        assert idle(llm)
