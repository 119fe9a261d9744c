"""Lesson 14: several replicas as one. The choice is pure; a token is never sent twice, whatever dies when."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_cases import greedy, whole

from minillm.cluster import data_parallel
from minillm.cluster.data_parallel import DataParallel, least_outstanding
from minillm.cluster.driver import Driver
from minillm.cluster.replica import ReplicaBusy, ReplicaLost, ReplicaState
from minillm.errors import MinillmError, RequestError
from minillm.request import CompletionOutput, RequestOutput

ANSWER = [11, 12, 13, 14]


class Fake(Driver):
    """Does what its plan says: ("ok",), ("lost", after tokens), ("busy", seconds), ("bad",), ("failed", after tokens).

    at_once: tokens that a read brings.
    """

    def __init__(self, name, *plan, at_once=1, alive=True):
        super().__init__(name)
        self.plan, self.at_once, self.living, self.closed, self.asked = list(plan), at_once, alive, 0, []

    async def _open(self):
        if not self.living:
            raise MinillmError(f"{self.name} cannot start")

    async def _ask(self):
        if not self.living:
            raise MinillmError("nobody is there")
        return ReplicaState(self.name, epoch=f"of {self.name}", max_model_len=100, total_blocks=8)

    async def _outputs(self, name, prompt, params, whose):
        self.asked.append(whose)
        kind, *how = self.plan.pop(0) if self.plan else ("ok",)
        if kind == "busy":
            raise ReplicaBusy(self.name, "full", how[0])
        if kind == "bad":
            raise RequestError("prompt", "bad")
        tokens = ANSWER if kind == "ok" else ANSWER[: how[0]]
        for i in range(self.at_once, len(tokens) + self.at_once, self.at_once):
            ended = kind == "ok" and i >= len(tokens)
            choice = CompletionOutput(0, "", tokens[:i], "length" if ended else None)
            yield RequestOutput(name or "", None, list(prompt), [choice], ended)
            await asyncio.sleep(0)
        if kind == "lost":
            self.living = False
            raise ReplicaLost(self.name, "it died")
        if kind == "failed":
            raise MinillmError("a step failed")

    async def _close(self):
        self.closed += 1


# The choice --------------------------------------------------------------------------------------------------------


def test_the_fewest_outstanding_tokens():
    a, b, c = (ReplicaState(n, outstanding_tokens=t) for n, t in (("a", 9), ("b", 3), ("c", 5)))
    assert least_outstanding([a, b, c]) == "b"
    assert least_outstanding([a, b, c], without=["b"]) == "c"
    assert least_outstanding([]) is None


def test_of_equals_the_one_that_was_asked_less():
    a, b = ReplicaState("a", requests=1), ReplicaState("b", requests=0, sent=9)
    assert least_outstanding([a, b]) == "b"
    assert least_outstanding([ReplicaState("a", sent=2), ReplicaState("b", sent=1)]) == "b"
    assert least_outstanding([ReplicaState("a"), ReplicaState("b")]) == "a"


@pytest.mark.parametrize("lack", ["alive", "ready"])
def test_nobody_who_is_not_able(lack):
    assert least_outstanding([ReplicaState("a", **{lack: False}), ReplicaState("b", outstanding_tokens=99)]) == "b"
    assert least_outstanding([ReplicaState("a", **{lack: False})]) is None


def test_load_is_shared():
    async def go():
        async with DataParallel([Fake("a"), Fake("b"), Fake("c")]) as three:
            streams = [three.generate([1] * 10, greedy(4)) for _ in range(6)]
            for s in streams:
                await anext(s)
            states = three.states()
            for s in streams:
                await s.aclose()
            assert [s.requests for s in three.states()] == [0, 0, 0]
            return states

    states = asyncio.run(go())
    assert [s.requests for s in states] == [2, 2, 2]
    assert [s.outstanding_tokens for s in states] == [2 * 3, 2 * 3, 2 * 3]  # each has one of its four


# Death ---------------------------------------------------------------------------------------------------------------

plans = st.one_of(
    st.just(("ok",)), st.just(("bad",)), st.tuples(st.just("lost"), st.integers(0, 4)),
    st.tuples(st.just("failed"), st.integers(0, 4)), st.tuples(st.just("busy"), st.none() | st.integers(1, 9)),
)  # fmt: skip
fleets = st.lists(st.tuples(plans, st.integers(1, 4)), min_size=1, max_size=4)


def told(fleet):
    """(all that the caller saw, how it ended, the replicas)"""
    replicas = [Fake(f"r{i}", plan, at_once=at_once) for i, (plan, at_once) in enumerate(fleet)]

    async def go():
        outputs, error = [], None
        async with DataParallel(replicas) as together:
            try:
                async for output in together.generate([1, 2], greedy(4)):
                    outputs.append(output.outputs[0].token_ids)
            except MinillmError as e:
                error = e
            assert together.state().requests == 0
        return outputs, error

    return *asyncio.run(go()), replicas


def holds(fleet):
    """Whether the caller saw each token once, and the truth about the end."""
    outputs, error, replicas = told(fleet)
    counts = [len(o) for o in outputs]
    grows = all(o == ANSWER[: len(o)] for o in outputs) and counts == sorted(set(counts))
    sent = counts[-1] if counts else 0
    if error is None:
        right = outputs[-1:] == [ANSWER]
    elif isinstance(error, ReplicaLost):
        right = error.tokens_sent == sent
    else:
        right = not isinstance(error, ReplicaBusy) or sent == 0
    asked = [r for r in replicas if r.asked]
    last = asked[-1].plan if asked else None
    once = all(len(r.asked) <= 1 for r in replicas) and last == []
    fine = [i for i, (plan, _) in enumerate(fleet) if plan == ("ok",)]
    gives_up = error is not None and sent == 0 and isinstance(error, ReplicaLost | ReplicaBusy)
    return grows and right and once and not (gives_up and fine), outputs, error


@given(fleets)
@settings(max_examples=150)
def test_each_token_once_and_the_truth_about_the_end(fleet):
    assert holds(fleet)[0], holds(fleet)


def test_the_property_notices_one_that_begins_again_after_a_token(monkeypatch):
    fleet = [(("lost", 2), 1), (("ok",), 1)]
    assert holds(fleet)[0]
    assert isinstance(holds(fleet)[2], ReplicaLost)

    monkeypatch.setattr(data_parallel, "sum", lambda tokens: 0, raising=False)  # it does not count what it has sent
    assert not holds(fleet)[0]


def test_before_the_first_token_another_answers():
    outputs, error, (a, b) = told([(("lost", 0), 1), (("ok",), 1)])
    assert error is None
    assert outputs[-1] == ANSWER
    assert (len(a.asked), len(b.asked)) == (1, 1)


def test_nobody_is_left():
    outputs, error, _ = told([(("lost", 0), 1), (("lost", 0), 1)])
    assert outputs == []
    assert isinstance(error, ReplicaLost)
    assert str(error).endswith("none of its replicas is left (r0: it died; r1: it died)")


def test_everybody_is_busy():
    _, error, _ = told([(("busy", 7), 1), (("busy", 3), 1), (("lost", 0), 1)])
    assert isinstance(error, ReplicaBusy)
    assert error.retry_after_s == 3


def test_bad_input_is_not_tried_elsewhere():
    _, error, (_, b) = told([(("bad",), 1), (("ok",), 1)])
    assert isinstance(error, RequestError)
    assert b.asked == []


def test_one_that_came_back_is_found():
    a = Fake("a", ("lost", 0))

    async def go():
        async with DataParallel([a], refresh_s=60.0) as alone:
            with pytest.raises(ReplicaLost):
                await whole(alone, [1], greedy(4))
            with pytest.raises(ReplicaLost):
                await whole(alone, [1], greedy(4))
            a.living = True
            return await whole(alone, [1], greedy(4))

    assert asyncio.run(go()).outputs[0].token_ids == ANSWER


def test_it_asks_by_itself():
    a = Fake("a", ("lost", 0))

    async def go():
        async with DataParallel([a], refresh_s=0.001) as alone:
            with pytest.raises(ReplicaLost):
                await whole(alone, [1], greedy(4))
            a.living = True
            while not alone.state().alive:
                await asyncio.sleep(0.001)

    asyncio.run(go())


def test_a_deadline_counts_what_the_first_replica_took(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(data_parallel, "time", type("", (), {"monotonic": staticmethod(lambda: now[0])}))

    class Slow(Fake):
        async def _outputs(self, *args):
            now[0] += 4.0
            async for output in super()._outputs(*args):
                yield output

    def go(deadline_s):
        a, b = Slow("a", ("lost", 0)), Fake("b")

        async def ask():
            async with DataParallel([a, b]) as both:
                return await whole(both, [1], greedy(4), "mine", deadline_s=deadline_s)

        return asyncio.run(ask()), b

    output, b = go(10.0)
    assert [w["deadline_s"] for w in b.asked] == [6.0]
    assert output.outputs[0].token_ids == ANSWER
    output, b = go(3.0)
    assert b.asked == []
    assert (output.outputs[0].finish_reason, output.finished, output.prompt_token_ids) == ("abort", True, [1])
    assert "3 s" in output.outputs[0].stop_reason


# All of them --------------------------------------------------------------------------------------------------------


def test_one_that_does_not_start_ends_the_others():
    a, b = Fake("a"), Fake("b", alive=False)
    with pytest.raises(MinillmError, match="b cannot start"):
        asyncio.run(DataParallel([a, b]).start())
    assert (a.closed, b.closed) == (1, 1)


@pytest.mark.parametrize("where", ["_open", "_ask"])
def test_who_stops_waiting_for_the_start_leaves_none_behind(where):
    async def go():
        a, b = Fake("a"), Fake("b")

        async def hangs():
            b.asked.append("to start")
            await asyncio.Event().wait()

        setattr(b, where, hangs)
        start = asyncio.create_task(DataParallel([a, b]).start())
        while not (a.state().alive and b.asked):
            await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert (a.closed, b.closed) == (1, 1)

    asyncio.run(go())


def test_the_state_is_the_sum():
    async def go():
        async with DataParallel([Fake("a"), Fake("b", alive=True)]) as both:
            before = both.state()
            both.replicas["a"].living = False
            return before, await both.refresh()

    before, after = asyncio.run(go())
    assert (before.total_blocks, before.max_model_len, before.epoch) == (16, 100, "of a+of b")
    assert before.free_blocks is None  # nobody tells
    assert (after.alive, after.ready) == (True, True)


def test_a_drain_of_all():
    async def go():
        async with DataParallel([Fake("a"), Fake("b")]) as both:
            stream = both.generate([1], greedy(4))
            await anext(stream)
            (call,) = [c for r in both.replicas.values() for c in r._calls]
            drain = asyncio.create_task(both.drain(0.01))
            await asyncio.wait([call.ended])  # the drain's time is up, and nobody reads
            with pytest.raises(ReplicaLost, match="drained"):
                await anext(stream)
            assert await drain == 1
            with pytest.raises(ReplicaBusy, match="draining"):
                await whole(both, [1], greedy(4))

    asyncio.run(go())


@pytest.mark.parametrize("replicas", [[], ["a", "a"]])
def test_names_of_their_own(replicas):
    with pytest.raises(MinillmError, match="name of its own"):
        DataParallel([Fake(n) for n in replicas])


@pytest.mark.parametrize("replicas", [None, [None], "x", [1], []], ids=repr)
def test_what_is_no_list_of_replicas_is_refused(replicas):
    with pytest.raises(MinillmError, match="data parallelism needs"):
        DataParallel(replicas)
