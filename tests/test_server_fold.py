"""From events to what requests felt: against stamps taken by others, under every schedule the engine can make."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_mutants import rewritten
from schedules import Parts, play
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import LLM, AsyncLLM, SamplingParams
from minillm.events import Event, EventLog
from minillm.server.fold import Fold, facts, observe
from minillm.shadow import ShadowCore

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"num_kv_blocks": 12, "max_model_len": 64, "dtype": "float32"}


def ev(step, time, kind, name="", **data):
    return Event(step, time, kind, name, data)


def a_step(number, end, rows, seconds=1.0):
    return ev(number, end, "step", rows=rows, seconds=seconds)


# By hand ------------------------------------------------------------------------------------------------

LIFE = [
    ev(0, 10.0, "queued", "a", prompt_tokens=5, tenant="t", arrival=9.5),
    a_step(0, 12.0, [("a", 3, 0)]),  # a chunk: no token
    ev(1, 13.9, "first_token", "a"),
    a_step(1, 14.0, [("a", 2, 3)]),
    a_step(2, 15.0, [("a", 1, 5)]),  # the second token
    ev(3, 15.2, "preempted", "a", how="recompute", computed=6),
    a_step(3, 16.0, [("b", 1, 9)]),  # somebody whose beginning the log has lost
    ev(4, 16.5, "hit", "a", tokens=4, source="prefix"),
    a_step(4, 17.5, [("a", 3, 4)]),  # everything again; the third token
    ev(5, 18.4, "finished", "a", reason="length", output_tokens=4),
    a_step(5, 18.5, [("a", 1, 7)]),
]


def test_a_life_in_numbers():
    (r,) = observe(LIFE)
    assert (r.request_id, r.tenant, r.finish_reason) == ("a", "t", "length")
    assert (r.prompt_tokens, r.generation_tokens, r.cached_tokens, r.preemptions) == (5, 4, 0, 1)
    assert (r.queue_s, r.prefill_s) == (1.5, pytest.approx(2.9))
    assert r.ttft_s == pytest.approx(4.4)
    assert r.gaps == pytest.approx([1.1, 2.5, 0.9])
    assert r.decode_s == pytest.approx(4.5) == sum(r.gaps)
    assert r.tpot_s == pytest.approx(4.5 / 3)
    assert r.inference_s == pytest.approx(7.4)
    assert r.e2e_s == pytest.approx(8.9)


def test_facts_come_as_soon_as_they_are_known():
    kinds = [(f.kind, f.value) for f in facts(LIFE) if f.kind in ("first_token", "gap", "preempted", "ended", "step")]
    assert kinds == [
        ("step", 3), ("first_token", pytest.approx(4.4)), ("step", 2), ("gap", pytest.approx(1.1)), ("step", 1),
        ("preempted", 6), ("step", 1), ("gap", 2.5), ("step", 3), ("gap", pytest.approx(0.9)), ("ended", 0.0),
        ("step", 1),
    ]  # fmt: skip


def test_kv_read_again_within_a_request_is_not_a_hit_of_the_prefix_cache():
    reused = [f.value for f in facts(LIFE) if f.kind == "reused"]
    assert reused == [0, 3, 5, 0, 0, 3], "what a hit gave (4 tokens) is not the request's own work"
    assert [f for f in facts(LIFE) if f.kind == "hit"] == [], "who comes back is no second query"


def test_a_request_that_ends_in_its_first_step_has_a_queue_time():
    life = [
        ev(0, 1.0, "queued", "a", prompt_tokens=2),
        ev(0, 3.5, "first_token", "a"),
        ev(0, 3.6, "finished", "a", reason="stop", output_tokens=1),
        a_step(0, 4.0, [("a", 2, 0)], seconds=2.0),
    ]
    (r,) = observe(life)
    assert (r.queue_s, r.prefill_s, r.decode_s, r.tpot_s) == (1.0, 1.5, 0.0, None)
    f = Fold()
    assert [[x.kind for x in f.feed(e)] for e in life] == [
        ["queued"], ["first_token"], [], ["began", "ended", "step", "reused"]
    ]  # fmt: skip
    assert not f.under_way
    assert not f._leaving


@pytest.mark.parametrize("between", [[], [ev(0, 2.5, "aborted", "a", computed=0)]])
def test_who_ends_in_the_queue_waited_all_its_time_and_never_began(between):
    end = ev(0, 2.5, "finished", "a", reason="abort", output_tokens=0)
    life = [ev(0, 1.0, "queued", "a", prompt_tokens=2), *between, end]
    f = Fold()
    (ended,) = [x for e in life for x in f.feed(e) if x.kind == "ended"]  # at once: there may be no other event
    r = ended.request
    assert (r.queue_s, r.ttft_s, r.decode_s, r.inference_s, r.tpot_s) == (None,) * 5
    assert (r.waited_s, r.e2e_s) == (1.5, 1.5)


def test_who_waits_for_the_event_of_a_step_that_never_came_is_let_go():
    life = [ev(0, 1.0, "queued", "a", prompt_tokens=2), ev(0, 2.0, "finished", "a", reason="error", output_tokens=0)]
    f = Fold()
    assert [x.kind for e in life for x in f.feed(e)] == ["queued"]
    assert f.flush(before=2.0) == []
    assert [(x.kind, x.label) for x in f.flush(before=2.1)] == [("ended", "error")]
    assert [x.kind for e in life for x in f.feed(e)] == ["queued"]
    assert [x.kind for x in f.feed(ev(0, 9.0, "queued", "b"))] == ["ended", "queued"]


def test_what_is_refused_at_the_door_is_no_request():
    log = [ev(0, 1.0, "refused", "a", field="prompt", reason="too long"), ev(0, 1.5, "hit", "a", tokens=4)]
    assert [(f.kind, f.label) for f in facts(log)] == [("refused", "prompt")]
    assert observe(log) == []


# Random schedules ----------------------------------------------------------------------------------------


def compare(seed, kind=Fold):
    """One random schedule; what the fold says beside what the requests and their outputs were stamped with."""
    seen, live, logs, ended = [], [], [], {}

    class Watched(ShadowCore):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.stamps = {}
            make = self.make_output

            def watched(request):
                output = make(request)
                push = output.push

                def stamped(token):
                    self.stamps.setdefault(request.request_id, []).append(self.clock())
                    return push(token)

                output.push = stamped
                return output

            self.make_output = watched
            f = kind(keep_gaps=True)

            def follow(event):
                for fact in f.feed(event):
                    live.append(fact)
                    if fact.kind == "ended":  # as it is then: who is told too early lacks what comes later
                        assert fact.request.request_id not in ended
                        ended[fact.request.request_id] = told(fact.request)

            self.events.subscribe(follow)
            self.events.subscribe(logs.append)
            seen.append((self, f))

        def add(self, request):
            seen[0][0].__dict__.setdefault("added", []).append(request)
            super().add(request)

        def hold(self, request):
            seen[0][0].__dict__.setdefault("added", []).append(request)
            super().hold(request)

    play(seed, Parts(core=Watched), moves=15, look_every=3)
    core, f = seen[0]
    assert not core.events.faults, core.events.faults
    assert not f.under_way
    assert not f._leaving
    requests = core.__dict__.get("added", [])
    assert set(ended) == {r.request_id for r in requests}
    for r in requests:
        o, tokens = SimpleNamespace(**ended[r.request_id]), core.stamps.get(r.request_id, [])
        assert o.finish_reason == r.finish_reason
        assert o.generation_tokens == len(r.output_token_ids) == len(tokens)
        assert (o.arrival, o.scheduled, o.finished) == (r.arrival, r.times.get("scheduled"), r.times["finished"])
        assert (o.first_token, o.last_token) == ((tokens[0], tokens[-1]) if tokens else (None, None))
        assert o.gaps == [b - a for a, b in itertools.pairwise(tokens)]
        assert (o.preemptions, o.cached_tokens) == (r.num_preemptions, r.num_cached_tokens)
    assert sum(x.value for x in live if x.kind == "step") == sum(core.shadow.computed)
    gaps = [x.value for x in live if x.kind == "gap"]
    assert sorted(gaps) == sorted(g for o in ended.values() for g in o["gaps"])
    return requests, logs, ended


def test_random_schedules_are_told_to_the_last_stamp():
    preempted = tokens = cached = unbegun = 0
    for seed in range(60):
        requests, logs, ended = compare(seed)
        preempted += sum(r.num_preemptions for r in requests)
        tokens += sum(len(r.output_token_ids) for r in requests)
        cached += sum(r.num_cached_tokens for r in requests)
        unbegun += sum("scheduled" not in r.times for r in requests)
        saved = EventLog.from_jsonl("".join(as_line(e) for e in logs))
        assert [told(o) for o in observe(saved)] == [*ended.values()], "a saved log says the same"
    assert min(preempted, tokens, cached, unbegun) > 20, "the schedules held hardly anything of it"


def told(o):
    return {name: getattr(o, name) for name in o.__slots__ if not name.startswith("_")}


def as_line(event):
    log = EventLog()
    log._append(event)
    return log.to_jsonl()


SLIPS = {
    "a resumed prompt draws no token": ("_step", ("r.prompt_tokens + r.generation_tokens", "r.prompt_tokens")),
    "every row draws a token": ("_step", ("before + n == r.prompt_tokens + r.generation_tokens", "True")),
    "the first token counts twice": ("_own", ("r.generation_tokens = 1", "r.generation_tokens = 0")),
    "the last token is forgotten": ("_own", ("facts += self._token(r, event)", "pass")),
    "a step begins at its end": ("_step", ('event.time - float(data.get("seconds", 0.0))', "event.time + 1.0")),
    "a resume begins again": ("_step", ("if r.scheduled is None:", "if before == r._hit:")),
    "hits after a preemption are of the prompt": ("_own", ("r.preemptions or r.scheduled is not None", "False")),
    "arrival is when it was queued": ("feed", ("event.time if arrival is None else arrival", "event.time + 0.001")),
    "who ends at once is told at once": ("_own", ("if r.scheduled is None:", "if False:")),
    "the aborted are kept": ("_own", ('r.finish_reason != "abort"', "True")),
}


@pytest.mark.parametrize("slip", list(SLIPS))
def test_the_schedules_notice(slip):
    method, *changes = SLIPS[slip]
    mutant = type("Mutant", (Fold,), {method: rewritten(Fold, method, *changes)})
    assert any(wrong(seed, mutant) for seed in range(60))


def wrong(seed, kind):
    try:
        compare(seed, kind)
    except AssertionError:
        return True
    return False


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.floats(0, 1))
def test_a_log_that_begins_in_the_middle_tells_the_truth_of_whom_it_knows(seed, where):
    _, logs, ended = compare(seed)
    rest = logs[round(where * len(logs)) :]
    known = {e.request_id for e in rest if e.kind == "queued"}
    observed = observe(rest)
    assert {o.request_id for o in observed} == known
    for o in observed:
        assert told(o) == ended[o.request_id]


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_log_in_any_order_breaks_nothing(rng: random.Random):
    events = LIFE * 2
    rng.shuffle(events)
    f = Fold()
    for e in events:
        f.feed(e)
    f.flush()
    assert not f._leaving
    assert len(f.under_way) <= 1


# A real engine ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """A random Qwen3 of 211 words."""
    folder = tmp_path_factory.mktemp("fold") / "model"
    shutil.copytree(tiny_folder("qwen3"), folder)
    Backend(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def test_the_stamps_of_a_real_engine(folder):
    """The engine's own stamps lie inside what the log tells: a step's event is recorded when the step retires.

    Time is how often the clock was read. A real one may stand between two readings for longer than a step takes.
    """
    llm = AsyncLLM(folder, **(SMALL | {"max_num_batched_tokens": 16, "num_kv_blocks": 8}))
    llm.core.clock = llm.engine.events.clock = functools.partial(next, itertools.count(1e6))
    prompts = [[5, 6], [7] * 20, [8], [9] * 33, [10, 11, 12]]

    async def one(i, prompt):
        return [o async for o in llm.generate(prompt, GREEDY, request_id=str(i))][-1]

    async def main():
        return await asyncio.gather(*[one(i, p) for i, p in enumerate(prompts)])

    try:
        outputs = asyncio.run(asyncio.wait_for(main(), 600))
    finally:
        llm.shutdown()
    observed = {o.request_id: o for o in observe(llm.engine.events)}
    steps = {e.step: e.time for e in llm.engine.events.of("step")}
    late = max(e.data["seconds"] for e in llm.engine.events.of("step"))
    assert late > 0
    assert len(steps) > 12, "too few steps to say anything"
    for i, out in enumerate(outputs):
        o, stamps = observed[str(i)], out.metrics
        assert o.generation_tokens == len(out.outputs[0].token_ids) == 12
        assert o.arrival == stamps["arrival"]
        assert stamps["scheduled"] <= o.scheduled <= stamps["first_token"] <= o.first_token
        assert stamps["last_token"] <= o.last_token
        assert stamps["finished"] <= o.finished
        assert len(o.gaps) == 11
        assert sum(o.gaps) == pytest.approx(o.decode_s)
        # Both ends lie in the step that drew the token: they are off by less than a step, and never early.
        for name in ("first_token", "last_token", "finished", "scheduled"):
            assert 0 <= getattr(o, name) - stamps[name] < late, name


def test_a_failed_step_a_row_that_is_no_distribution_and_a_broken_detokenizer(folder):
    """Who was in a failed step has no queue time (nobody knows what was computed), and all are told to have ended."""
    llm = LLM(folder, **SMALL)
    core, forward = llm.engine.core, llm.engine.core.runner.forward

    def nan(requests, counts):
        return forward(requests, counts) * float("nan")

    def broken(requests, counts):
        raise RuntimeError("the device is gone")

    def run(change):
        core.runner.forward = change
        llm.engine.events.clear()
        done = llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0].outputs[0]
        assert done.finish_reason == "error"
        (o,) = observe(llm.engine.events)
        return o

    try:
        o = run(nan)
        assert (o.finish_reason, o.generation_tokens) == ("error", 0)
        assert o.queue_s is not None
        assert o.ttft_s is None
    finally:
        core.runner.forward = forward
    with pytest.raises(Exception, match="device is gone"):
        run(broken)
    core.runner.forward = forward
    (o,) = observe(llm.engine.events)
    assert (o.finish_reason, o.queue_s, o.generation_tokens) == ("error", None, 0)
    assert o.waited_s is not None


def test_the_module_needs_nothing_but_the_engine():
    code = "import sys; sys.modules.update(dict.fromkeys(('prometheus_client', 'fastapi', 'uvicorn'))); "
    subprocess.run([sys.executable, "-c", code + "import minillm.server.fold"], check=True)
