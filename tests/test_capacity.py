"""What a request costs and how many a machine can take: fits on made-up machines whose a and b are known."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import MinillmError
from minillm.events import EventLog
from minillm.roofline import capacity
from minillm.roofline.capacity import Cost, StepModel
from minillm.trace.arrivals import poisson
from minillm.trace.latency import SLO, Stamps

A, B = 0.8e-3, 9e-3  # seconds a prompt token, seconds an output token
STEPS = StepModel(w=20e-3, a=0.8e-3, d=1.5e-3)


def requests(n, seed=0, noise=0.05, a=A, b=B):
    rng = random.Random(seed)
    made = []
    for _ in range(n):
        m, k = rng.randint(10, 1500), rng.randint(5, 300)
        made.append((m, k, (a * m + b * k) * rng.uniform(1 - noise, 1 + noise)))
    return made


def test_a_and_b_are_found_and_hold_on_requests_the_fit_never_saw():
    train, held = requests(20, 1), requests(20, 2)
    cost = capacity.fit(train)
    assert cost.a == pytest.approx(A, rel=0.1)
    assert cost.b == pytest.approx(B, rel=0.1)
    assert max(cost.errors(held)) < 0.15
    assert statistics.median(cost.errors(held)) < 0.05


MISTAKES = {
    "prompts cost nothing": lambda c: replace(c, a=0.0),
    "a fifth off": lambda c: replace(c, a=1.2 * c.a, b=1.2 * c.b),
    "swapped": lambda c: Cost(c.b, c.a),
    "a mean of all": lambda c: Cost((c.a + c.b) / 2, (c.a + c.b) / 2),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_wrong_fit_is_beyond_the_bound(what):
    cost = MISTAKES[what](capacity.fit(requests(20, 1)))
    assert max(cost.errors(requests(20, 2))) > 0.15


def test_a_cost_that_is_not_of_this_form_is_found_out():
    """Attention over a long prompt grows with its square: held-out requests show it."""
    square = [(m, n, s + 2e-6 * m * m) for m, n, s in requests(20, 1)]
    held = [(m, n, s + 2e-6 * m * m) for m, n, s in requests(20, 2)]
    assert max(capacity.fit(square).errors(held)) > 0.15


def test_no_cost_is_negative():
    cost = capacity.fit([(100, 1, 1.0), (1, 10, 0.001), (200, 2, 2.0), (50, 30, 0.4)])
    assert min(cost.a, cost.b) >= 0


@pytest.mark.parametrize(
    "bad",
    [
        [], [(10, 5, 1.0)], [(10, 5, 1.0), (20, 10, 2.0), (40, 20, 4.0)], [(10, 5, 0.0), (20, 3, 1.0)],
        [(0, 0, 1.0), (1, 2, 3.0)],
    ],
    ids=["none", "one", "always twice as long a prompt", "no time", "no tokens"],
)  # fmt: skip
def test_requests_that_cannot_tell_a_from_b_are_refused(bad):
    with pytest.raises(MinillmError):
        capacity.fit(bad)


def made_steps(model=STEPS, n=60, seed=0, noise=0.03, most=32):
    rng = random.Random(seed)
    made = []
    for _ in range(n):
        p, r = rng.choice([0, 0, 0, 64, 256]), rng.randint(0, most)
        if p + r:
            made.append((p, r, model.seconds(p, r) * rng.uniform(1 - noise, 1 + noise)))
    return made


def test_steps_tell_the_weights_from_the_rows_and_so_b_at_every_batch():
    model = capacity.fit_steps(made_steps(seed=1))
    assert (model.w, model.a, model.d) == pytest.approx((STEPS.w, STEPS.a, STEPS.d), rel=0.1)
    assert max(model.errors(made_steps(seed=2))) < 0.15
    alone, full = model.cost(1), model.cost(32)
    assert alone.a == full.a
    assert alone.b == pytest.approx(STEPS.w + STEPS.d, rel=0.1)
    assert full.b == pytest.approx(STEPS.w / 32 + STEPS.d, rel=0.1)
    assert alone.b > 5 * full.b  # a fit of single requests would promise a fifth of the rate


def test_steps_of_one_batch_size_cannot_tell_the_weights_from_the_rows():
    with pytest.raises(MinillmError, match="batch"):
        capacity.fit_steps([(p, 8, STEPS.seconds(p, 8)) for p in (0, 64, 256, 0, 64)])


def test_steps_are_read_from_an_event_log():
    log = EventLog(clock=lambda: 0.0)
    log.record("queued", "a", prompt_tokens=5)
    log.record("queued", "b", prompt_tokens=1)
    log.record("step", rows=[["a", 3, 0]], seconds=0.3)
    log.record("step", rows=[["a", 2, 3], ["b", 1, 0]], seconds=0.2)
    log.record("step", rows=[["a", 1, 5], ["b", 1, 1]], seconds=0.1)
    log.record("step", rows=[], seconds=0.1)
    # A row that begins a request is prompt, also when it is one token.
    assert capacity.steps_of(log) == [(3, 0, 0.3), (3, 0, 0.2), (0, 2, 0.1)]


def test_the_rate_limit_is_one_over_the_mean_cost():
    cost = Cost(A, B)
    lengths = [(100, 50), (900, 10)]
    mean = statistics.mean(A * m + B * n for m, n in lengths)
    assert capacity.rate_limit(cost, lengths) == pytest.approx(1 / mean)
    assert capacity.rate_limit(cost, lengths, machines=3) == pytest.approx(3 / mean)
    # Without prompts it is R / n, R in tokens a second.
    assert capacity.rate_limit(Cost(0, B), [(0, 40)]) == pytest.approx((1 / B) / 40)
    with pytest.raises(MinillmError):
        capacity.rate_limit(cost, [])


def simulate(model, rate, m, n, seats, requests=1500, seed=0):
    """An engine of this step model, one step at a time: (time to first token, time per token) means, and served rate.

    Written from the engine's rules, not from the formula: a step computes every running request's next token and the
    whole prompts of those that found a seat.
    """
    due = poisson(requests, rate, seed)
    now, i, waiting, running = 0.0, 0, [], {}
    first, tpot, ended = {}, [], 0.0
    while len(tpot) < requests:
        while i < requests and due[i] <= now:
            waiting.append(i)
            i += 1
        if not waiting and not running:
            now = due[i]
            continue
        new = [waiting.pop(0) for _ in range(min(len(waiting), seats - len(running)))]
        now += model.seconds(m * len(new), len(running))
        for k in list(running):
            running[k] -= 1
            if not running[k]:
                del running[k]
                tpot.append((now - due[k] - first[k]) / (n - 1))
                ended = now
        for k in new:
            first[k], running[k] = now - due[k], n - 1
    return statistics.mean(first.values()), statistics.mean(tpot), requests / ended


SHAPES = ((100, 40, 32), (20, 100, 16), (64, 64, 4))
SHARES = (0.2, 0.5, 0.7)


@pytest.fixture(scope="module")
def simulated():
    """(shape, rate): the mean of four runs of the simulated engine."""
    found = {}
    for (m, n, seats), share in itertools.product(SHAPES, SHARES):
        rate = share * capacity.knee(STEPS, m, n, seats)
        runs = [simulate(STEPS, rate, m, n, seats, seed=i) for i in range(4)]
        found[m, n, seats, rate] = [statistics.mean(x) for x in zip(*runs, strict=True)]
    return found


def off(model, simulated):
    """The greatest error of TPOT and of TTFT over all shapes and rates."""
    errors = []
    for (m, n, seats, rate), (ttft, tpot, _) in simulated.items():
        load = capacity.predict_load(model, rate, m, n, seats)
        errors.append((abs(load.tpot_s - tpot) / tpot, abs(load.ttft_s - ttft) / ttft))
    return [max(e) for e in zip(*errors, strict=True)]


def test_the_predicted_curve_is_that_of_a_simulated_engine(simulated):
    tpot, ttft = off(STEPS, simulated)
    assert tpot < 0.06
    assert ttft < 0.15


def test_a_wrong_step_model_is_beyond_those_bounds(simulated):
    for name in ("w", "a", "d"):
        for factor in (0.8, 1.2):
            tpot, ttft = off(replace(STEPS, **{name: factor * getattr(STEPS, name)}), simulated)
            assert tpot > 0.06 or ttft > 0.15, (name, factor)


def test_what_the_formula_adds_is_needed(simulated, monkeypatch):
    """Mutation: without the wait for a seat the curve leaves the engine."""
    monkeypatch.setattr(capacity, "waiting", lambda *_: 0.0)
    assert off(STEPS, simulated)[1] > 0.3


def test_beyond_the_knee_the_simulated_engine_serves_no_more():
    m, n, seats = 100, 40, 32
    knee = capacity.knee(STEPS, m, n, seats)
    _, tpot, served = simulate(STEPS, 2 * knee, m, n, seats)
    assert served == pytest.approx(knee, rel=0.1)
    assert tpot == pytest.approx(capacity.predict_load(STEPS, 2 * knee, m, n, seats).tpot_s, rel=0.1)
    assert capacity.predict_load(STEPS, 2 * knee, m, n, seats).ttft_s == math.inf


@pytest.mark.parametrize(
    "mistake", [lambda s: replace(s, w=0.0), lambda s: replace(s, a=0.0), lambda s: replace(s, d=0.0)]
)
def test_a_knee_that_forgets_a_term_is_another_number(mistake):
    served = simulate(STEPS, 3.0 * capacity.knee(STEPS, 100, 40, 8), 100, 40, 8, requests=400)[2]
    assert capacity.knee(STEPS, 100, 40, 8) == pytest.approx(served, rel=0.1)
    assert capacity.knee(mistake(STEPS), 100, 40, 8) != pytest.approx(served, rel=0.1)


def test_the_knee_is_one_over_the_cost_at_full_batch():
    assert capacity.knee(STEPS, 100, 40, 32) == pytest.approx(capacity.rate_limit(STEPS.cost(32), [(100, 40)]))
    assert capacity.knee(STEPS, 100, 40, 32) > 2 * capacity.knee(STEPS, 100, 40, 1)


steps = st.builds(StepModel, st.floats(1e-4, 1), st.floats(0, 0.01), st.floats(1e-5, 0.1))


@given(steps, st.integers(1, 500), st.integers(1, 200), st.integers(1, 64), st.floats(0.01, 0.99))
def test_more_load_is_never_faster_and_below_the_knee_everything_is_served(model, m, n, seats, share):
    knee = capacity.knee(model, m, n, seats)
    low, high = (capacity.predict_load(model, x * knee, m, n, seats) for x in (share / 2, share))
    assert low.tpot_s <= high.tpot_s * (1 + 1e-9)
    assert low.ttft_s <= high.ttft_s * (1 + 1e-9)
    assert high.served == share * knee
    assert high.running <= seats * (1 + 1e-9)
    # Little's law ties the parts of the prediction together.
    assert high.running == pytest.approx(high.rate * n * high.tpot_s, rel=1e-6)


def test_waiting_for_one_seat_is_pollaczek_and_khinchine():
    service, rate = 0.5, 1.2
    for cv in (0.0, 1.0, 2.0):
        rho = rate * service
        exact = rho / (1 - rho) * service * (1 + cv**2) / 2
        assert capacity.waiting(rate, 1 / service, 1, cv=cv) == pytest.approx(exact)
    assert capacity.waiting(2.0, 2.0, 1) == math.inf
    # Four seats with one queue wait less than four queues, and have a limit four times as high.
    assert capacity.waiting(4 * rate, 4 / service, 4) < capacity.waiting(rate, 1 / service, 1)
    assert capacity.waiting(3.0, 4.0, 8, occupied=0.5) < capacity.waiting(3.0, 4.0, 8)


def test_the_rate_within_an_slo_is_where_the_curve_meets_it():
    m, n, seats = 100, 40, 32
    knee = capacity.knee(STEPS, m, n, seats)
    tight = STEPS.seconds(0, 8)  # a step of eight streams
    rate = capacity.rate_within(STEPS, SLO(tpot_s=tight), m, n, seats)
    assert 0 < rate < knee
    assert capacity.predict_load(STEPS, rate, m, n, seats).tpot_s == pytest.approx(tight, rel=1e-3)
    assert capacity.rate_within(STEPS, SLO(), m, n, seats) == pytest.approx(knee, rel=1e-3)
    assert capacity.rate_within(STEPS, SLO(tpot_s=STEPS.w / 2), m, n, seats) == 0.0
    by_e2e = capacity.rate_within(STEPS, SLO(e2e_s=1.5), m, n, seats)
    at = capacity.predict_load(STEPS, by_e2e, m, n, seats)
    assert at.ttft_s + (n - 1) * at.tpot_s == pytest.approx(1.5, rel=1e-3)


def test_the_measured_knee_is_where_served_leaves_offered():
    offered = [1, 2, 3, 4, 5, 6, 8]
    served = [min(x, 4.4) for x in offered]
    assert capacity.measured_knee(offered, served) == pytest.approx(4.4)
    noisy = [y * (1 + 0.02 * (-1) ** i) for i, y in enumerate(served)]
    assert capacity.measured_knee(offered, noisy) == pytest.approx(4.4, rel=0.05)
    assert capacity.measured_knee([1, 2, 3], [1, 2, 3]) is None  # it has not been reached
    with pytest.raises(MinillmError):
        capacity.measured_knee([1, 2], [1])


# Little's law -----------------------------------------------------------------------------------------------------


def run(rate=5.0, n=400, hold=lambda rng: rng.expovariate(2.0), seed=0):
    rng, out = random.Random(seed), []
    for at in poisson(n, rate, seed):
        last = at + hold(rng)
        out.append(Stamps(at, at, ((last, 1),), last, 1, 1, 200))
    return out


def test_littles_law_is_exact_over_a_whole_run():
    law = capacity.little(run())
    assert law.in_system == pytest.approx(law.rate * law.time, rel=1e-9)
    assert law.error < 1e-9
    assert law.rate == pytest.approx(5.0, rel=0.15)


def test_in_a_window_it_holds_for_steady_traffic_and_fails_for_a_queue_that_grows():
    steady = run(n=4000)
    assert capacity.little(steady, (100.0, 700.0)).error < 0.1
    growing = [replace(s, chunks=((s.sent + 0.1 * i, 1),)) for i, s in enumerate(run(n=400))]
    assert capacity.little(growing, (20.0, 40.0)).error > 0.25


def test_the_number_in_the_system_is_counted_not_derived():
    """By hand: one request from 0 to 4, one from 1 to 2. Mutation: a mean over arrivals sees another number."""
    two = [Stamps(0, 0, ((4.0, 1),), 4.0, 1, 1, 200), Stamps(1, 1, ((2.0, 1),), 2.0, 1, 1, 200)]
    law = capacity.little(two)
    assert (law.in_system, law.rate, law.time) == (5 / 4, 2 / 4, 2.5)
    assert capacity.little(two, (0.0, 2.0)).in_system == 1.5
    with pytest.raises(MinillmError):
        capacity.little(two, (2.0, 2.0))
    with pytest.raises(MinillmError):
        capacity.little([])


def test_predictions_refuse_what_is_no_load():
    for bad in ({"rate": -1.0}, {"rate": math.nan}, {"m": -1}, {"n": 0}, {"seats": 0}):
        with pytest.raises(MinillmError):
            capacity.predict_load(STEPS, **({"rate": 1.0, "m": 10, "n": 10, "seats": 4} | bad))
    with pytest.raises(MinillmError, match="no time"):
        capacity.predict_load(StepModel(0, 0, 0), 1.0, 10, 10, 4)
    for a, b in itertools.product((-1.0, math.nan), (1.0,)):
        with pytest.raises(MinillmError):
            Cost(a, b)
