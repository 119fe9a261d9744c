"""The event log: bounded in events and in rows, whatever a step holds, and the same after a file."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm import events
from minillm.errors import MinillmError
from minillm.events import MAX_ROWS, EventLog, by_request


def rows(n, computed=1000):
    return [(f"request {i}", 1, computed + i) for i in range(n)]


@given(steps=st.lists(st.integers(0, 9), max_size=40), maxlen=st.integers(1, 12), most=st.integers(1, 30))
def test_a_log_is_bounded_in_events_and_in_rows(steps, maxlen, most):
    """The last events that fit are kept; the newest always."""
    log, all_of_them = EventLog(maxlen, max_rows=most), []
    for n in steps:
        log.record("step", rows=rows(n))
        all_of_them.append(n)
        kept = [len(e.data["rows"]) for e in log]
        assert kept == all_of_them[len(all_of_them) - len(kept) :]
        assert len(kept) <= maxlen
        assert sum(kept) <= most or len(kept) == 1
        if len(kept) < min(maxlen, len(all_of_them)):
            assert sum(all_of_them[-len(kept) - 1 :]) > most, "an event was dropped that had room"
    log.clear()
    log.record("step", rows=rows(most))
    assert len(log) == 1, "cleared rows do not count"


def test_a_wide_batch_keeps_the_log_small():
    """100,000 steps of 256 requests would be gigabytes: a row is a tuple and its numbers, about a hundred bytes."""
    log = EventLog(max_rows=10_000)
    for step in range(1000):
        log.record("step", rows=rows(256, 1000 + step))
    held = [row for e in log for row in e.data["rows"]]
    assert 10_000 - 256 < len(held) <= 10_000
    each = sys.getsizeof(held[0]) + 8 + sum(sys.getsizeof(x) for x in held[0][1:])
    assert MAX_ROWS * each < 160 << 20


def test_other_events_need_no_rows_and_none_are_kept_without_room():
    log = EventLog(max_rows=5)
    log.record("queued", "a", prompt_tokens=3)
    log.record("step", rows=rows(4))
    log.record("finished", "a", reason="length")
    assert [e.kind for e in log.of("queued", "finished")] == ["queued", "finished"]
    assert list(by_request(log)) == ["a"]
    nothing = EventLog(0)
    nothing.record("step", rows=rows(4))
    assert len(nothing) == 0


def test_a_file_gives_the_log_back_and_names_a_line_that_is_no_event():
    log = EventLog(clock=lambda: 1.5)
    log.record("queued", "a", prompt_tokens=3)
    log.step = 7
    log.record("step", rows=rows(2), waiting=0)
    again = EventLog.from_jsonl(log.to_jsonl())
    assert again.step == 7
    assert again.to_jsonl() == log.to_jsonl()
    assert [tuple(row) for row in again.of("step")[0].data["rows"]] == rows(2)
    for line in ("{}", "[]", "nothing", '{"step": 1, "time": 0, "kind": "step", "data": 5}'):
        with pytest.raises(MinillmError, match="line 2"):
            EventLog.from_jsonl(log.to_jsonl().splitlines()[0] + f"\n{line}\n")


def test_a_subscriber_sees_every_event_and_its_faults_hurt_nobody():
    log, seen = EventLog(maxlen=0), []
    end = log.subscribe(seen.append)
    log.subscribe(lambda event: 1 / 0)
    log.record("queued", "a", prompt_tokens=3)
    end()
    log.record("queued", "b", prompt_tokens=3)
    assert [e.request_id for e in seen] == ["a"]
    assert log.faults == {"ZeroDivisionError": 2}
    assert len(log) == 0


@pytest.mark.parametrize("other", ["record", "clear"])
def test_two_threads_keep_one_count_of_rows(monkeypatch, other):
    """The server refuses in its loop's thread while the engine's records a step: one may come into the other's middle.

    A count that is too high drops events that have room, one that is too low lets the log grow.
    """
    log, inside, done = EventLog(max_rows=10), threading.Event(), threading.Event()
    log.record("step", rows=rows(4))
    real, first = events._rows, threading.current_thread()

    def slowly(event):
        if threading.current_thread() is first and not inside.is_set():
            inside.set()
            done.wait(0.2)  # with a lock the other cannot get in, and this ends unheard
        return real(event)

    def meddle():
        assert inside.wait(10)
        log.clear() if other == "clear" else log.record("step", rows=rows(3))
        done.set()

    monkeypatch.setattr(events, "_rows", slowly)
    thread = threading.Thread(target=meddle)
    thread.start()
    log.record("step", rows=rows(2))
    thread.join()
    assert log._rows == sum(len(e.data["rows"]) for e in log)


ROWS = {
    "a prompt": ([["a", 3, 0]], (3, 0)),
    "a prompt of one token": ([["a", 1, 0]], (1, 0)),
    "a chunk, and two that decode": ([["a", 4, 8], ["b", 1, 9], ["c", 1, 1]], (4, 2)),
    "computed again after a preemption, beyond the prompt": ([["a", 6, 4]], (6, 0)),
    "the last token of a prompt costs what a decode costs": ([["a", 1, 4]], (0, 1)),
    "nothing": ([], (0, 0)),
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_are_prompts_or_decodes(what):
    given_rows, expected = ROWS[what]
    assert events.work(given_rows) == expected


@given(st.lists(st.tuples(st.just("a"), st.integers(1, 9), st.integers(0, 9)), max_size=8))
def test_the_meter_and_the_capacity_fit_see_the_same_steps(drawn):
    """Two fits of one cost: a step that one takes for a prompt and the other for a decode would part them."""
    from minillm.roofline import capacity
    from minillm.server.meter import LoadMeter

    log, seen = EventLog(clock=lambda: 0.0), []
    meter = LoadMeter(8)
    meter.fit.observe = lambda p, d, seconds: seen.append((p, d, seconds))
    log.subscribe(meter.observe)
    log.record("queued", "a", prompt_tokens=5, max_tokens=9)
    log.record("step", rows=[list(row) for row in drawn], seconds=0.5)
    assert not log.faults
    assert capacity.steps_of(log) == seen
