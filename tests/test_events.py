"""The event log: bounded in events and in rows, whatever a step holds, and the same after a file."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
