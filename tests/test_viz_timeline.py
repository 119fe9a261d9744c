"""Timelines, the scheduler explorer, and what they read from an event log: by hand, and of shadow engines."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from minillm.cache.paged import PagedCache
from minillm.cache.prefix import RadixPrefixCache
from minillm.errors import MinillmError
from minillm.events import EventLog
from minillm.scheduler import Limits
from minillm.shadow import ShadowCore
from minillm.viz import lives, scheduler_explorer, scheduler_figure, style, timeline, timelines

BUDGET = 12


class Log(EventLog):
    """A log by hand: its clock is set, not read."""

    def __init__(self):
        self.now = 10.0
        super().__init__(clock=lambda: self.now)

    def retire(self, *rows, waiting=0, running=0, seconds=1.0, **blocks):
        self.now += seconds
        self.record("step", rows=list(rows), waiting=waiting, running=running, seconds=seconds, **blocks)
        self.step += 1


def by_hand(first=0):
    """a: a prompt of 5 in two chunks, 3 tokens; b waits a step, is preempted, hits 4, and ends; c is aborted."""
    log = Log()
    log.step = first
    log.record("queued", "a", prompt_tokens=5, priority=0, tenant="")
    log.record("queued", "b", prompt_tokens=6, priority=-1, tenant="t")
    log.retire(("a", 3, 0), waiting=1, running=1, free=6, cached=0, live=2)
    log.retire(("a", 2, 3), ("b", 6, 0), running=2, free=4, cached=0, live=4)
    log.record("queued", "c", prompt_tokens=1, priority=0, tenant="")
    log.record("preempted", "b", how="recompute", computed=6, blocks=2)
    log.retire(("a", 1, 5), waiting=2, running=1, seconds=3.0, free=4, cached=2, live=2)
    log.record("hit", "b", tokens=4, source="prefix")
    log.record("finished", "a", reason="length", output_tokens=3)
    log.retire(("a", 1, 6), ("b", 3, 4), waiting=1, running=1, free=4, cached=1, live=3)
    log.record("aborted", "c", computed=0)
    log.record("finished", "c", reason="abort", output_tokens=0)
    log.record("finished", "b", reason="length", output_tokens=2)
    log.retire(("b", 1, 7), free=6, cached=2, live=0)
    return log


def spans(one):
    return [(s.kind, s.start, s.end, s.tokens) for s in one.spans]


def marks(one):
    return [(m.kind, m.x, m.text) for m in one.marks]


@pytest.mark.parametrize("first", [0, 57])
def test_lives_by_step(first):
    a, b, c = lives.lives(by_hand(first))
    assert spans(a) == [("chunk", 0, 1, 3), ("chunk", 1, 2, 2), ("decode", 2, 4, 2)]
    assert marks(a) == [("finished", 4, "length")]
    assert spans(b) == [
        ("waiting", 0, 1, 0), ("chunk", 1, 2, 6), ("preempted", 2, 3, 0), ("chunk", 3, 4, 3), ("decode", 4, 5, 1)
    ]  # fmt: skip
    assert marks(b) == [("preempted", 2, "recompute"), ("hit", 3, "4"), ("finished", 5, "length")]
    assert (b.priority, b.tenant, b.prompt_tokens) == (-1, "t", 6)
    assert spans(c) == [("waiting", 2, 4, 0)]
    assert marks(c) == [("aborted", 4, "abort")]
    assert b.seconds("waiting", "preempted") == 2


def test_lives_by_time():
    a, b, c = lives.lives(by_hand(), "time")
    assert spans(a) == [("chunk", 0, 1, 3), ("chunk", 1, 2, 2), ("decode", 2, 6, 2)]
    assert [s[:3] for s in spans(b)][2] == ("preempted", 2, 5)
    assert spans(c) == [("waiting", 2, 6, 0)]


def test_a_request_that_runs_and_gets_nothing_is_held():
    log = Log()
    log.record("queued", "a", prompt_tokens=2, priority=0, tenant="")
    log.retire(("a", 2, 0), running=1)
    log.retire(("b", 1, 9), running=2)  # b's beginning has left the log
    log.retire(("a", 1, 2), ("b", 1, 10), running=2)
    log.retire(("b", 1, 11), running=2)
    a, b = lives.lives(log)
    assert spans(a) == [("chunk", 0, 1, 2), ("held", 1, 2, 0), ("decode", 2, 3, 1), ("held", 3, 4, 0)]
    assert spans(b) == [("decode", 1, 4, 3)]
    assert lives.state_at(log, 3).held == ["a"]
    assert lives.state_at(log, 2).held == []


def test_refused_once():
    log = Log()
    log.record("refused", "x", field="request", reason="full")
    log.record("queued", "y", prompt_tokens=99, priority=0, tenant="")
    log.retire(("z", 1, 0))
    log.record("refused", "y", field="prompt", reason="does not fit")
    log.record("finished", "y", reason="error", output_tokens=0)
    log.retire(("z", 1, 1))
    found = {one.request_id: marks(one) for one in lives.lives(log)}
    assert found["x"] == [("refused", 0, "full")]
    assert found["y"] == [("refused", 1, "does not fit")]


def test_steps_and_states():
    log = by_hand()
    every = lives.steps(log)
    assert [(s.prefill, s.decode) for s in every] == [(3, 0), (8, 0), (0, 1), (3, 1), (0, 1)]
    assert [(s.live, s.cached, s.free) for s in every][2] == (2, 2, 4)
    state = lives.state_at(log, 2)
    assert [(q.request_id, q.tokens, q.steps, q.priority, q.preempted) for q in state.queue] == [
        ("c", 1, 0, 0, False), ("b", 7, 0, -1, True)
    ]  # fmt: skip
    assert state.rows == [lives.Running("a", 5, 1, 6, True)]
    assert state.preempted == ["b"]
    state = lives.state_at(log, 3)
    assert state.finished == ["a"]
    assert state.hits == {"b": 4}
    assert [r.request_id for r in state.rows] == ["a", "b"]
    assert state.queue[0].steps == 1
    state = lives.state_at(log, 4)
    assert [q.request_id for q in state.queue] == []
    assert sorted(state.finished) == ["b", "c"]
    assert state.held == []
    with pytest.raises(MinillmError, match="steps 0 to 4, got 5"):
        lives.state_at(log, 5)


@pytest.mark.parametrize("draw", [timeline, lives.lives, lambda log: scheduler_figure(log, 0)])
def test_a_log_without_a_step_is_refused_in_words(draw):
    log = EventLog()
    log.record("queued", "a", prompt_tokens=5, priority=0, tenant="")
    with pytest.raises(MinillmError, match="no step"):
        draw(log)


def test_bad_words_are_refused():
    with pytest.raises(MinillmError, match="'step' or by 'time'"):
        timeline(by_hand(), "tokens")
    with pytest.raises(MinillmError, match="no request 'q'"):
        timeline(by_hand(), requests=["q"])
    with pytest.raises(MinillmError, match="got 'queue'"):
        timeline(by_hand(), strips=["queue"])


# Real logs ---------------------------------------------------------------------------------------------


def shadow_log(seed, n=8, blocks=12, prefix=True):
    rng = random.Random(seed)

    def cache(pool, events):
        return PagedCache(pool, prefix=RadixPrefixCache(pool.block_size), namespace="shadow", events=events)

    core = ShadowCore(blocks, 4, limits=Limits(4, BUDGET), make_cache=cache if prefix else None)
    todo = [core.request([rng.randrange(2) for _ in range(rng.randint(1, 20))], rng.randint(1, 15)) for _ in range(n)]
    made = list(todo)
    while todo or core.has_work:
        if todo and rng.random() < 0.4:
            core.add(todo.pop(0))
        if rng.random() < 0.03 and core.has_work:
            core.abort(rng.choice(list(core.outputs)))
        core.step()
    return core.events, made


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), prefix=st.booleans())
def test_lives_tell_the_log_s_own_truth(seed, prefix):
    """Each computed token is in one span; nothing overlaps; who finished has its end where its last span has."""
    log, made = shadow_log(seed, prefix=prefix)
    every = lives.lives(log)
    assert [one.request_id for one in every] == [r.request_id for r in made]
    computed = sum(n for e in log.of("step") for _, n, _ in e.data["rows"])
    assert sum(s.tokens for one in every for s in one.spans) == computed
    assert computed == sum(s.prefill + s.decode for s in lives.steps(log))
    for one, r in zip(every, made, strict=True):
        for before, after in zip(one.spans, one.spans[1:], strict=False):
            assert before.end == after.start
        ends = [m for m in one.marks if m.kind in ("finished", "aborted")]
        assert len(ends) == 1
        assert not one.spans or ends[0].x == one.spans[-1].end
        assert ends[0].text == r.finish_reason
        assert sum(m.kind == "preempted" for m in one.marks) == r.num_preemptions


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_states_agree_with_the_scheduler_s_counts(seed):
    log, _ = shadow_log(seed)
    for i, e in enumerate(log.of("step")):
        state = lives.state_at(log, i)
        assert len(state.queue) == e.data["waiting"]
        running = {r.request_id for r in state.rows} | set(state.held)
        assert len(running - set(state.finished)) == e.data["running"]
        assert all(r.computed + r.new <= r.tokens for r in state.rows)
        assert all((r.decode is True) == (r.new == 1 and r.computed + 1 == r.tokens) for r in state.rows if r.decode)


def boxes(ax, color):
    return [p for p in ax.patches if isinstance(p, Rectangle) and to_hex(p.get_facecolor()).upper() == color]


def labels(ax):
    return [t.get_text() for t in ax.get_yticklabels()]


def test_timeline_draws_what_lives_say():
    log = by_hand()
    fig = timeline(log, budget=BUDGET, title="by hand")
    rows, blocks, tokens = fig.axes
    assert labels(rows) == ["a", "b p-1 t", "c"]
    assert [(p.get_x(), p.get_width()) for p in boxes(rows, style.BLUE)] == [(2, 2), (4, 1)]
    assert [(p.get_x(), p.get_width()) for p in boxes(rows, style.ORANGE)] == [(0, 1), (1, 1), (1, 1), (3, 1)]
    assert [t.get_text() for t in rows.texts] == ["3", "2", "6", "3", "4"]  # chunks of a, of b, and b's hit
    assert [line.get_label() for line in rows.get_lines() if line.get_marker() not in ("None", "")] == [
        "finished", "preempted", "hit", "finished", "aborted"
    ]  # fmt: skip
    assert blocks.get_ylim() == (0, 8)
    decode = [(p.get_x(), p.get_height()) for p in tokens.patches[:5]]
    assert decode == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1)]
    assert [p.get_height() for p in tokens.patches[5:]] == [3, 8, 0, 3, 0]
    (line,) = tokens.get_lines()
    assert list(line.get_ydata()) == [BUDGET, BUDGET]
    words = {t.get_text() for t in fig.legends[0].get_texts()}
    assert {"waits", "preempted", "aborted"} < words
    assert "refused" not in words


def test_timeline_without_pages_has_no_blocks():
    log = Log()
    log.record("queued", "a", prompt_tokens=2, priority=0, tenant="")
    log.retire(("a", 2, 0), running=1)
    assert [ax.get_ylabel() for ax in timeline(log).axes] == ["request", "tokens"]


@pytest.mark.parametrize(("n", "drawn"), [(4, 4), (40, 40), (70, 40)])
def test_timeline_of_many_requests(n, drawn):
    log, _ = shadow_log(3, n)
    fig = timeline(log, "time", budget=BUDGET)
    assert len(labels(fig.axes[0])) == drawn
    assert (f"the first 40 of {n}" in fig.axes[0].get_title(loc="left")) == (n > 40)
    assert fig.get_size_inches()[1] < 10
    assert len(style.png(fig)) < 100_000  # a notebook holds it


def test_timelines_share_their_x_axis():
    one, other = shadow_log(1, 4)[0], shadow_log(2, 9)[0]
    fig = timelines({"one": one, "other": other})
    assert fig.axes[0].get_xlim() == fig.axes[1].get_xlim()
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["one", "other"]
    assert labels(fig.axes[0])[0] == "1"  # the shadow's ids begin with 1
    assert labels(timelines({"one": one}, ids=False).axes[0]) == ["0", "1", "2", "3"]
    last = max(len(one.of("step")), len(other.of("step")))
    assert fig.axes[0].get_xlim()[1] == pytest.approx(1.01 * last)


def test_scheduler_figure_shows_queue_rows_and_bars():
    fig = scheduler_figure(by_hand(), 3, BUDGET)
    queue, running, low = fig.axes
    assert queue.get_title(loc="left") == "queue: 1"
    assert [t.get_text() for t in queue.texts] == ["c: 1 tokens, waits 1"]
    assert running.get_title(loc="left") == "step 3: 2 requests, 3 prompt tokens, 1 decode"
    assert {"6 + 1 of 7, finished", "4 + 3 of 7"} <= {t.get_text() for t in running.texts}
    assert [p.get_width() for p in boxes(running, style.ORANGE)] == [3]
    said = [t.get_text() for t in low.texts]
    assert f"1 decode, 3 prompt of {BUDGET}" in said
    assert "3 live, 1 cached, 4 free" in said
    assert "preempted b" in scheduler_figure(by_hand(), 2).axes[1].get_title(loc="left")


def test_scheduler_figure_of_a_long_queue_says_what_is_left_out():
    log = Log()
    for i in range(30):
        log.record("queued", str(i), prompt_tokens=2, priority=0, tenant="")
    log.retire(("0", 2, 0), waiting=29, running=1)
    fig = scheduler_figure(log, 0)
    assert fig.axes[0].get_title(loc="left") == "queue: 29 (13 not shown)"
    assert len(fig.axes[0].texts) == 16


def test_the_explorer_moves_and_stops_at_the_ends():
    log, _ = shadow_log(5)
    box = scheduler_explorer(log, BUDGET)
    (slider, back, on), picture = box.children[0].children, box.children[1]
    first = bytes(picture.value)
    assert first == style.png(scheduler_figure(log, 0, BUDGET))
    back.click()
    assert slider.value == 0
    on.click()
    assert slider.value == 1
    assert bytes(picture.value) == style.png(scheduler_figure(log, 1, BUDGET)) != first
    slider.value = slider.max
    on.click()
    assert slider.value == slider.max == len(log.of("step")) - 1
