"""What a user feels, by definition: TTFT, ITL, TPOT, tails, goodput. Each rule with the mistake it excludes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import MinillmError
from minillm.trace import latency, report
from minillm.trace.latency import SLO, SLOS, Stamps


def stamps(*chunks, sent=0.5, **changes):
    """One answered request, sent half a second after its time. chunks: (time, tokens)."""
    tokens = sum(n for _, n in chunks)
    values = {
        "scheduled": 0.0, "sent": sent, "chunks": chunks, "end": chunks[-1][0] + 0.25 if chunks else sent,
        "prompt_tokens": 7, "output_tokens": tokens, "status": 200,
    }  # fmt: skip
    return Stamps(**values | changes)


def even(n=5, first=1.0, gap=0.1, **changes):
    return stamps(*((first + i * gap, 1) for i in range(n)), **changes)


def test_the_four_times_of_one_request():
    one = stamps((1.0, 1), (1.5, 2), (3.0, 1))
    assert one.ttft == 0.5  # from when it was sent, not from when the stream was opened or scheduled
    assert one.itl == [0.5, 1.5]  # one gap between arrivals, also where an arrival brings two tokens
    assert one.tpot == pytest.approx(2.0 / 3)  # four tokens have three gaps
    assert one.e2e == 2.5  # to the last token, not to the end of the stream
    assert one.lateness == 0.5
    assert (one.from_schedule().ttft, one.from_schedule().e2e) == (1.0, 3.0)
    assert one.from_schedule().tpot == one.tpot


def test_tpot_is_not_the_mean_gap_when_a_chunk_brings_several_tokens():
    """Mutation: dividing by the number of gaps, or by n, gives other numbers."""
    one = stamps((1.0, 1), (2.0, 4))
    assert one.tpot == 0.25
    assert one.tpot != sum(one.itl) / len(one.itl)
    assert one.tpot != (one.last - one.first) / one.tokens


def test_the_last_token_of_a_natural_end_has_no_text_and_comes_with_the_finish_reason():
    """The end-of-sequence token is one of n. Mutation: without its arrival a gap is missing, and TPOT is too low."""
    one = even(7, first=1.0, gap=0.1, output_tokens=8, finished=1.7)
    assert one.tpot == pytest.approx(0.1)
    assert (one.last, one.e2e) == (1.7, pytest.approx(1.2))
    assert one.itl == even(7, first=1.0, gap=0.1).itl  # a reader sees no text come then
    assert one.ttft == 0.5
    blind = replace(one, finished=None)
    assert blind.tpot < 0.9 * one.tpot
    assert latency.duration([one]) == pytest.approx(1.7)
    assert even(finished=0.9).last == even().last  # of several choices one may end early


def test_an_answer_that_is_an_end_and_nothing_else_has_no_text_to_time():
    one = stamps(output_tokens=1, finished=1.5)
    assert (one.first, one.last, one.ttft, one.tpot, one.e2e) == (None, None, None, None, None)


def test_what_cannot_be_known_is_none_and_never_zero():
    nothing = stamps()
    assert (nothing.ttft, nothing.tpot, nothing.itl) == (None, None, [])
    assert not nothing.ok
    assert even(1).tpot is None
    assert even(1).ttft == 0.5
    assert nothing.e2e is None


def test_tokens_come_from_the_usage_chunk_and_else_from_the_chunks():
    assert stamps((1, 1), (2, 1), output_tokens=5).tokens == 5  # text of several tokens may come in one chunk
    assert stamps((1, 1), (2, 1), output_tokens=None).tokens == 2


@pytest.mark.parametrize(
    "change",
    [{"status": 429}, {"status": None}, {"error": "timeout"}, {"cancelled": True}, {"chunks": (), "output_tokens": 0}],
)
def test_only_a_whole_answer_is_ok(change):
    assert even().ok
    assert not even(**change).ok


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_numpys_linear_ones(xs, q):
    assert latency.percentile(xs, q) == pytest.approx(float(np.percentile(xs, q)), rel=1e-9, abs=1e-9)


def test_nearest_rank_would_be_another_number():
    """Mutation: the test above tells methods apart."""
    assert latency.percentile([0, 1], 50) == 0.5
    assert float(np.percentile([0, 1], 50, method="nearest")) != 0.5


@pytest.mark.parametrize(("xs", "q"), [([], 50), ([1.0], -1), ([1.0], 101), ([1.0], math.nan)])
def test_a_percentile_of_nothing_or_of_no_rank_is_refused(xs, q):
    with pytest.raises(MinillmError):
        latency.percentile(xs, q)


def test_a_good_mean_hides_a_bad_tail():
    s = latency.summarize([0.01] * 98 + [2.0, 2.0])
    assert s.count == 100
    assert s.mean < 0.06
    assert s.p50 == s.p95 == 0.01
    assert s.p99 == 2.0
    assert s.max == 2.0
    assert latency.summarize([None, None]) is None
    assert latency.summarize([None, 1.0]).count == 1


def test_an_slo_is_met_only_when_all_of_it_is():
    good = even(5, first=1.0, gap=0.1)  # TTFT 0.5, TPOT 0.1, e2e 0.9
    assert SLO(ttft_s=0.5, tpot_s=0.1001, e2e_s=0.91).met(good)
    for bound in ({"ttft_s": 0.49}, {"tpot_s": 0.099}, {"e2e_s": 0.89}, {"itl_s": 0.09}):
        assert not replace(SLO(1, 1, 1, 1), **bound).met(good), bound
    assert not SLO().met(even(status=500))  # an error meets nothing, however fast it came
    assert SLO(tpot_s=1e-9).met(even(1))  # one token has no gap that could be too long


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, "1", True])
def test_an_slo_is_made_of_seconds(bad):
    with pytest.raises(MinillmError, match="ttft_s"):
        SLO(ttft_s=bad)


def test_goodput_counts_good_requests_over_the_whole_run():
    run = [even(5, first=i + 0.6, sent=float(i), scheduled=float(i)) for i in range(10)]
    slow = [even(5, first=i + 5.6, sent=float(i), scheduled=float(i)) for i in range(10)]
    slo = SLO(ttft_s=1.0)
    seconds = latency.duration(run + slow)
    assert seconds == pytest.approx(9 + 5.6 + 0.4)  # first schedule to last token
    assert latency.goodput(run + slow, slo) == pytest.approx(10 / seconds)
    assert latency.goodput(run + slow, slo) < latency.goodput(run + slow, SLO())  # which is throughput
    assert latency.goodput(run, slo, seconds=20) == 0.5


def test_goodput_from_schedule_sees_the_requests_that_a_stalled_client_never_sent():
    """Coordinated omission: the server stalls once, the client waits, and times from `sent` look good."""
    stalled = [even(2, first=5.1, sent=5.0, scheduled=float(i)) for i in range(5)]
    slo = SLO(ttft_s=0.5)
    assert all(slo.met(s) for s in stalled)
    assert [slo.met(s.from_schedule()) for s in stalled] == [False] * 5
    assert latency.goodput(stalled, slo, seconds=10) == 0.0
    found = report.report(stalled, slo)
    assert found["goodput_rps"] == 0.0
    assert found["ttft"]["max"] == pytest.approx(0.1)
    assert (found["ttft_from_schedule"]["p50"], found["ttft_from_schedule"]["max"]) == (pytest.approx(3.1), 5.1)
    assert "TTFT from schedule" in report.show(found)


def test_in_a_closed_loop_goodput_counts_from_when_a_request_was_sent():
    """It is due when it is sent: nothing to make up for."""
    run = [even(2, first=i + 0.6, sent=float(i), scheduled=float(i)) for i in range(4)]
    assert latency.goodput(run, SLO(ttft_s=0.7), seconds=4) == 1.0


def test_presets_are_complete_and_say_why():
    assert set(SLOS) == {"chat", "rag", "agent", "batch"}
    assert all(len(slo.reason) > 40 for slo in SLOS.values())
    assert SLOS["chat"].ttft_s < SLOS["rag"].ttft_s
    assert SLOS["batch"].ttft_s is SLOS["batch"].tpot_s is None
    with pytest.raises(MinillmError, match="chat, rag, agent"):
        latency.slo("chatty")
    assert latency.slo("ttft=0.5,tpot=0.05") == SLO(ttft_s=0.5, tpot_s=0.05)
    with pytest.raises(MinillmError, match="ttft, tpot, e2e, itl"):
        latency.slo("ttl=1")
    with pytest.raises(MinillmError, match="seconds"):
        latency.slo("ttft=fast")


def test_buckets_show_the_length_that_suffers():
    short = [even(2, first=0.6, prompt_tokens=10) for _ in range(99)]
    long = [even(2, first=9.6, prompt_tokens=3000)]
    groups = latency.by_length(short + long, bounds=(128, 1024))
    assert {name: len(g) for name, g in groups.items()} == {"1-128": 99, "over 1024": 1}
    assert latency.worst(groups, lambda s: s.ttft) == "over 1024"
    assert latency.summarize(s.ttft for s in short + long).p95 < 1  # which the percentile of all does not show
    assert list(latency.by_length([even(prompt_tokens=n) for n in (1, 128, 129)], (128,))) == ["1-128", "over 128"]
    assert list(latency.by_length([even(3)], (2, 5), of="output")) == ["3-5"]
    assert latency.by_length([even(prompt_tokens=None)]) == {"unknown": [even(prompt_tokens=None)]}
    with pytest.raises(MinillmError, match="rising"):
        latency.by_length([], (5, 2))


numbers = st.floats(0, 1e6, allow_nan=False)
any_stamps = st.builds(
    Stamps, scheduled=numbers, sent=numbers, end=numbers,
    chunks=st.lists(st.tuples(numbers, st.integers(0, 5)), max_size=5).map(lambda c: tuple(sorted(c))),
    prompt_tokens=st.none() | st.integers(0, 99), output_tokens=st.none() | st.integers(0, 99),
    status=st.none() | st.sampled_from([200, 429]), error=st.none() | st.text(), retry_after_s=st.none() | numbers,
    cancelled=st.booleans(), finish_reason=st.none() | st.just("stop"), request_id=st.text(),
    finished=st.none() | numbers,
)  # fmt: skip


@given(st.lists(any_stamps, max_size=4))
def test_raw_stamps_survive_a_file(every):
    assert latency.from_jsonl(latency.to_jsonl(every)) == every


@pytest.mark.parametrize("line", ["{", "[]", '{"sent": 1}', '{"scheduled": "x"}', '{"nothing": 1}'])
def test_a_line_that_is_no_request_is_named(line):
    good = latency.to_jsonl([even()])
    with pytest.raises(MinillmError, match="line 2"):
        latency.from_jsonl(good + line + "\n")


def test_the_report_counts_every_fate_once():
    refused = {"chunks": (), "output_tokens": None}
    run = [even(), even(), even(status=429, retry_after_s=3.0, **refused), even(status=503, **refused)]
    run += [even(cancelled=True), even(error="timeout", status=None)]
    found = report.report(run, SLO(ttft_s=1.0))  # from when it was due, half a second before it was sent
    assert found["requests"] == {"sent": 6, "ok": 2, "rejected": 2, "cancelled": 1, "failed": 1}
    assert sum(v for k, v in found["requests"].items() if k != "sent") == 6
    assert found["retry_after_s"] == [3.0]
    assert found["errors"] == {"timeout": 1, "status 429": 1, "status 503": 1}
    assert found["ttft"]["count"] == 2
    assert found["itl"]["count"] == 8
    assert found["output_tokens_per_s"] == pytest.approx(10 / latency.duration(run))
    assert found["goodput_rps"] == pytest.approx(2 / latency.duration(run))
    text = report.show(found)
    for word in ("TTFT", "TPOT", "ITL", "E2E", "p50", "p95", "p99", "goodput", "rejected", "Retry-After"):
        assert word in text
    assert "TTFT" in report.show(report.report([]))
