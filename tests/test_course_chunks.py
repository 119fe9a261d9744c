"""Exercise 10's tools: a chunked scheduler as a part of an engine, its laws in words, the references by brute force."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import LLM, SamplingParams
from minillm.course.checks import chunks
from minillm.course.checks.shadows import Game, first_fault
from minillm.policy import Priority
from minillm.scheduler import Limits, Scheduler
from minillm.shadow import ShadowCore

GAME = Game(steps=30, roomy=True, full=False)


def faults(kind, seeds=range(60), game=GAME):
    return first_fault(seeds, game, scheduler=chunks.chunked_part(kind))


def test_the_reference_has_no_fault_in_any_memory():
    assert faults(chunks.ChunkedScheduler, range(40)) == ""
    assert faults(chunks.ChunkedScheduler, range(40), Game(steps=30, full=False)) == ""


@pytest.mark.parametrize(("kind", "words"), [
    (chunks.PromptsFirst, "frozen stream"),
    (chunks.NothingSetAside, "frozen stream"),
    (chunks.AdmitsFirst, "frozen stream"),
    (chunks.StreamsAreFree, "the budget is"),
    (chunks.WholeNewcomers, "the budget is"),
    (chunks.NoChunks, "of the budget are left"),
    (chunks.AdmitsWithNothing, "frozen stream"),
    (chunks.ForgetsSeats, "requests run; at most"),
])  # fmt: skip
def test_each_law_is_broken_by_a_scheduler_and_told_in_words(kind, words):
    assert words in faults(kind)


@given(st.lists(st.integers(1, 12), max_size=6), st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_a_plan_is_the_best_of_all_plans(missing, budget):
    """Of all ways to share: streams first, then prompts, in order, each as much as it can use."""
    given_ = chunks.plan_step(missing, budget)
    assert sum(given_) == min(budget, sum(missing))
    left = budget
    for wanted in (True, False):
        for n, g in zip(missing, given_, strict=True):
            if (n == 1) is wanted:
                assert g == min(n, left)
                left -= g


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_reference_plans_what_the_engine_schedules(prompts, budget):
    """The engine's own scheduler over a shadow: the same tokens for those who run, in every step."""
    core = ShadowCore(200, 4, limits=Limits(8, budget))
    for p in prompts:
        core.add(core.request(range(p), 6))
    for _ in range(30):
        running = list(core.scheduler.running)
        missing = [r.num_new_tokens for r in running]
        if not core.has_work:
            break
        core.step()
        rows = {name: n for name, n, _ in core.events.of("step")[-1].data["rows"]}
        want = chunks.plan_step(missing, budget)
        assert [rows.get(r.request_id, 0) for r in running] == want


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.booleans()), min_size=1, max_size=4))
@settings(max_examples=80, deadline=None)
def test_a_mixed_batch_reads_exactly_what_was_written_before(rows):
    """Playing the batch over a memory that knows what it holds: each token finds its own history, in order."""
    size, tables = 4, itertools.count(1)
    batch_rows, memory, names = [], {}, []
    for i, (start, new, done) in enumerate(rows):
        table = [next(tables) for _ in range(-(-(start + new) // size))]
        for p in range(start):
            memory[table[p // size] * size + p % size] = (i, p)
        batch_rows.append((table, start, new, new if done else new + 3))
        names += [(i, p) for p in range(start, start + new)]
    out = chunks.flat_batch(batch_rows, size)
    for slot, name in zip(out["slots"], names, strict=True):
        assert slot not in memory
        memory[slot] = name
    assert out["positions"] == [p for _, p in names]
    assert [[memory[s] for s in reads] for reads in out["reads"]] == [[(i, q) for q in range(p + 1)] for i, p in names]
    last = [max(j for j, (k, _) in enumerate(names) if k == i) for i in range(len(rows))]
    assert out["logits"] == [last[i] for i, (_, _, done) in enumerate(rows) if done]


@given(st.integers(1, 30), st.integers(1, 200), st.floats(0.0, 100.0))
@settings(max_examples=100, deadline=None)
def test_the_budget_is_the_largest_that_keeps_the_promise(streams, room, target):
    seconds = lambda s, chunk: 5.0 + 0.5 * s + 0.25 * chunk
    most = streams + room
    best = chunks.choose_budget(seconds, streams, target, most)
    fits = [b for b in range(streams + 1, most + 1) if seconds(streams, b - streams) <= target]
    assert best == max(fits, default=streams + 1)


def test_an_urgent_document_freezes_nobody():
    def gap(kind):
        core = ShadowCore(64, 4, Priority(3.0), Limits(8, 8), make_scheduler=kind)
        streams = [core.request([i], 20) for i in range(3)]
        for r in streams:
            core.add(r)
        core.step()
        core.add(core.request(range(40), 2, priority=-9))
        core.finish_all()
        steps = [e for e in core.events if e.kind == "step"]
        seen = [[e.step for e in steps if r.request_id in [row[0] for row in e.data["rows"]]] for r in streams]
        return max(b - a for one in seen for a, b in itertools.pairwise(one))

    assert gap(Scheduler) == 1
    assert gap(chunks.chunked_part(chunks.ChunkedScheduler)) == 1


def test_a_mounted_scheduler_gives_the_engines_text():
    small = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 16, "max_num_batched_tokens": 8}
    texts, how = (
        ["The capital of France is", "1, 2, 3, 4, 5, 6, 7, 8, 9,"],
        SamplingParams(temperature=0.0, max_tokens=4),
    )
    mine = LLM(**small, parts={"scheduler": chunks.chunked_part(chunks.ChunkedScheduler)})
    got = [o.outputs[0].token_ids for o in mine.generate(texts, how, use_tqdm=False)]
    assert max(sum(n for _, n, _ in e.data["rows"]) for e in mine.engine.events.of("step")) == 8
    assert got == [o.outputs[0].token_ids for o in LLM(**small).generate(texts, how, use_tqdm=False)]


def test_three_routes_by_which_a_long_request_slows_short_ones():
    """Lesson 10's interview question, executed: arithmetic, order, memory; and which of them a budget closes."""

    def run(chunked=True, blocks=400, first=False):
        core = ShadowCore(blocks, 4, limits=Limits(8, 16, chunked))
        long = core.request(range(200), 40, arrival=0.5 if first else 10.0)
        shorts = [core.request([i] * 3, 60) for i in range(3)]
        if first:
            core.add(long)
            for _ in range(14):
                core.step()
        for r in shorts:
            core.add(r)
        for _ in range(3):
            core.step()
        if not first:
            core.add(long)
        core.step()
        late = core.request([7, 7], 2, arrival=20.0)
        core.add(late)
        core.finish_all()
        steps = [{name: n for name, n, _ in e.data["rows"]} for e in core.events if e.kind == "step"]
        started = next(i for i, rows in enumerate(steps) if shorts[0].request_id in rows)
        lives = [rows for rows in steps[started:] if long.request_id in rows and rows[long.request_id] > 1]
        alone = sum(shorts[0].request_id not in rows for rows in lives)
        begins = next(i for i, rows in enumerate(steps) if late.request_id in rows)
        ends = max((i for i, rows in enumerate(steps) if rows.get(long.request_id, 0) > 1), default=0)
        return alone, begins >= ends, sum(r.num_preemptions for r in shorts)

    assert run(chunked=False)[0] == 1  # arithmetic: one step in which no stream moves
    assert run()[0] == 0  # closed by the budget
    assert run()[1]  # order: the newcomer begins when the document is done, budget or not
    assert run(first=True)[2] == 0
    assert run(blocks=70, first=True)[2] > 0  # memory: short ones give up their blocks
