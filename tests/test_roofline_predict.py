"""Predictions: the formula, its bounds, the classifier that flips, the 70 B example, and the fit on held-out shapes."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import MinillmError
from minillm.models.presets import preset
from minillm.roofline import cost, device, fit, predict
from minillm.roofline.device import DATASHEET, Device

SMOL = preset("smollm2-135m")
LLAMA = preset("llama-3.1-8b")
H200 = device.device("h200")


def machine(**changes):
    """A measured two-core machine with round numbers."""
    values = {
        "name": "two cores", "kind": "cpu", "peak_flops": {"float32": 200e9, "bfloat16": 400e9}, "read_bandwidth": 35e9,
        "copy_bandwidth": 30e9, "triad_bandwidth": 32e9, "gather_bandwidth": 25e9, "memory_bytes": 24 << 30,
        "call_overhead": 2e-6, "source": "measured", "gemm": {"bfloat16": {1: 15e9, 8: 100e9, 32: 250e9, 512: 400e9}},
    }  # fmt: skip
    return Device(**(values | changes))


def test_seventy_billion_parameters_at_two_terabytes_a_second():
    """140 GB / 2 TB/s = 70 ms = 14.3 tokens/s."""
    seconds = predict.weights_floor(70e9, "bfloat16", 2e12)
    assert seconds == pytest.approx(0.070)
    assert round(1 / seconds, 1) == 14.3
    with pytest.raises(MinillmError):
        predict.weights_floor(0, "bfloat16", 2e12)


def test_one_operator_is_the_larger_of_its_times_plus_its_calls():
    op = cost.Op("x", "attention", flops=8_000_000, kv_read=350_000, activations_read=350_000, calls=3, rows=1)
    t = predict.term(op, machine(), "bfloat16")
    assert t.flops_seconds == pytest.approx(20e-6)
    assert t.bytes_seconds == pytest.approx(20e-6)
    assert t.seconds == pytest.approx(26e-6)
    small = predict.term(cost.Op("x", "attention", flops=8, kv_read=350_000, rows=1), machine(), "bfloat16")
    assert (small.seconds, small.bound) == (pytest.approx(10e-6), "memory")


def test_kinds_meet_their_own_ceiling():
    byte = {"activations_read": 1_000_000, "rows": 1}
    seconds = {
        k: predict.term(cost.Op("x", k, **byte), machine(), "bfloat16").bytes_seconds
        for k in ("linear", "elementwise", "gather")
    }
    assert seconds == {
        "linear": pytest.approx(1e6 / 35e9),
        "elementwise": pytest.approx(1e6 / 30e9),
        "gather": pytest.approx(1e6 / 25e9),
    }


def test_decode_of_an_8b_model_on_an_h200_reads_its_weights():
    p = predict.predict_step(LLAMA, [(1, 4096)], H200)
    weights = 2 * (8_030_261_248 - 128256 * 4096) + 2 * 4096
    kv = 2 * 32 * 4096 * 8 * 128 * 2
    assert p.compulsory_bytes == weights + kv + kv // 4096
    assert p.lower == pytest.approx((weights + kv + kv // 4096) / 4.8e12)
    assert p.lower <= p.expected <= 1.05 * p.lower
    assert p.bound == "memory"
    assert p.tokens_per_s == pytest.approx(1 / p.expected)


def test_the_classifier_flips_with_batch_and_with_context():
    """No phase has a fixed label."""
    bound = lambda rows: predict.predict_step(LLAMA, rows, H200).bound
    assert bound([(1, 128)]) == "memory"
    assert bound([(1, 128)] * 512) == "compute"  # the same decode, many together
    assert bound([(1, 8192)] * 512) == "memory"  # and back: every sequence brings its own KV
    assert bound([(2048, 0)]) == "compute"
    assert bound([(16, 0)]) == "memory"  # a prefill too short to reach the ridge


def test_a_short_context_reaches_the_ridge_at_the_batch_the_ridge_names():
    """With no KV and no activations to speak of, FLOPs a weight byte = batch (bf16: 2 FLOPs for 2 bytes)."""
    ridge = H200.ridge("bfloat16")
    flip = next(b for b in range(1, 2000) if predict.predict_step(LLAMA, [(1, 0)] * b, H200).bound == "compute")
    assert ridge == pytest.approx(989.5e12 / 4.8e12)
    assert ridge < flip < 1.6 * ridge  # activations cost the rest


@given(
    st.lists(st.tuples(st.integers(1, 600), st.integers(0, 4000)), min_size=1, max_size=8),
    st.sampled_from(["here", *DATASHEET]),
    st.sampled_from(["bfloat16", "float32"]),
    st.booleans(),
)
@settings(max_examples=60)
def test_bounds_enclose_the_expectation(rows, name, dtype, kv_cache):
    where = machine() if name == "here" else DATASHEET[name]
    rows = rows if kv_cache else [(n, 0) for n, _ in rows]
    p = predict.predict_step(SMOL, rows, where, dtype, kv_cache=kv_cache)
    assert 0 < p.lower <= p.expected <= p.upper < math.inf
    assert p.expected == pytest.approx(sum(t.seconds for t in p.terms))
    assert p.bytes >= p.compulsory_bytes
    assert (p.intensity >= p.ridge) == (p.bound == "compute")


def test_a_generation_is_the_sum_of_its_steps():
    whole = predict.predict_generation(SMOL, [10, 20], [4, 2], machine())
    steps = [[(10, 0)], [(20, 0)], [(1, 10), (1, 20)], [(1, 11)], [(1, 12)]]
    parts = [predict.predict_step(SMOL, rows, machine()) for rows in steps]
    for name in ("lower", "expected", "upper", "flops", "bytes"):
        assert getattr(whole, name) == pytest.approx(sum(getattr(p, name) for p in parts))
    assert whole.tokens == 6
    assert sum(t.seconds for t in whole.terms) == pytest.approx(whole.expected)


def test_the_gap_between_naive_and_cached_grows():
    gap = [
        predict.predict_generation(SMOL, [n], 32, machine(), kv_cache=False).expected
        / predict.predict_generation(SMOL, [n], 32, machine()).expected
        for n in (16, 128, 512)
    ]
    assert 1 < gap[0] < gap[1] < gap[2]


def test_plain_data_gives_the_same_prediction():
    from dataclasses import asdict

    shape = {"model": asdict(SMOL), "dtype": "bfloat16", "kv_cache": True, "rows": [[1, 99], [3, 4]]}
    again = predict.predict_shape(json.loads(json.dumps(shape)), machine())
    assert again == predict.predict_step(SMOL, [(1, 99), (3, 4)], machine())
    with pytest.raises(MinillmError, match="cannot be predicted"):
        predict.predict_shape({"dtype": "bfloat16"}, machine())


# Devices ------------------------------------------------------------------------------------------------------------


def test_datasheet_peaks_are_dense():
    """A peak with sparsity would be twice a known dense one."""
    assert device.device("H100").peak("bf16") == pytest.approx(989.5e12)
    assert device.device("a100").peak("bf16") == 312e12
    assert device.device("mi300x").peak("bf16") == pytest.approx(1307.4e12)
    for known in DATASHEET.values():
        assert known.source == "datasheet"
        assert known.peak("float32") < known.peak("bfloat16")
        assert 20 < known.ridge("bfloat16") < 450


def test_unknown_devices_and_dtypes_are_named():
    with pytest.raises(MinillmError, match="h300.*a100.*mi300x"):
        device.device("h300")
    with pytest.raises(MinillmError, match="has no peak for float16"):
        machine().peak("float16")
    with pytest.raises(MinillmError, match="read_bandwidth"):
        machine(read_bandwidth=0.0)
    with pytest.raises(MinillmError, match="describe a device"):
        Device.from_dict({"name": "x"})


def test_gemm_rate_between_and_beyond_the_measured_rows():
    m = machine()
    assert m.gemm_rate("bfloat16", 8) == pytest.approx(100e9)
    assert 100e9 < m.gemm_rate("bfloat16", 16) < 250e9
    assert m.gemm_rate("bfloat16", 16) == pytest.approx(math.sqrt(100e9 * 250e9))  # halfway in log
    assert m.gemm_rate("bfloat16", 4096) == 400e9
    assert m.gemm_rate("float32", 8) == m.peak("float32")  # never measured: the peak


def test_a_device_survives_json():
    m = machine()
    assert Device.from_dict(json.loads(json.dumps(m.to_dict()))) == m


def test_measured_ceilings_are_cached_under_the_machines_identity(tmp_path, monkeypatch):
    from minillm.roofline import measure

    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    calls = []

    def fake(kind):
        calls.append(kind)
        return machine(identity=measure.identity(kind), read_bandwidth=35e9 + len(calls))

    monkeypatch.setattr(measure, "measure", fake)
    first = device.this_machine("cpu")
    assert device.this_machine("cpu") == first
    assert len(calls) == 1
    assert device.this_machine("cpu", remeasure=True) != first
    saved = next(tmp_path.glob("ceilings-*.json"))
    saved.write_text("{ cut")  # a broken cache is measured again, not believed
    device.this_machine("cpu")
    assert len(calls) == 3
    monkeypatch.setattr(measure, "cpu_model", lambda: "another processor")
    device.this_machine("cpu")
    assert len(calls) == 4


def test_ceilings_of_a_busy_machine_are_measured_again_by_the_next_process(tmp_path, monkeypatch):
    from minillm.roofline import measure

    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    shares, calls = iter([0.5, 0.4, 0.9]), []

    def fake(kind):
        calls.append(next(shares))
        return machine(identity=measure.identity(kind), spread={"processor share": {"median": calls[-1]}})

    def told():  # by a process that has just begun
        monkeypatch.setattr(device, "_TRIED", set())
        return [device.this_machine("cpu").processor_share for _ in range(2)]

    monkeypatch.setattr(measure, "measure", fake)
    assert told() == [0.5, 0.5]
    assert told() == [0.5, 0.5]  # it was no better
    assert told() == [0.9, 0.9]
    assert told() == [0.9, 0.9]
    assert calls == [0.5, 0.4, 0.9]


def test_probes_move_the_bytes_they_say(monkeypatch):
    """With a clock that gives one second a call, the rate is the bytes moved: n, 2n, 3n, 2n."""
    from minillm.roofline import measure

    monkeypatch.setattr(measure, "seconds", lambda run, where, repeats, warmup=2: [run(), 1.0][1:])
    found = measure.bandwidths("cpu", megabytes=1, repeats=1)
    size = 1 << 20
    assert found["read"] == [size] * 3 + [2 * size] * 3
    assert found["copy"] == [2 * size, 4 * size]
    assert found["triad"] == [3 * size, 6 * size]
    assert found["gather"] == [2 * size, 4 * size]


def test_gemm_rates_count_the_products_that_ran(monkeypatch):
    import torch

    from minillm.models.linear import Linear, can_pack
    from minillm.roofline import measure

    done = []
    real = Linear.__call__
    monkeypatch.setattr(
        Linear,
        "__call__",
        lambda self, x: done.append(2 * len(x) * self.in_features * self.out_features) or real(self, x),
    )
    monkeypatch.setattr(measure, "seconds", lambda run, where, repeats, warmup=1: [run(), 1.0][1:])
    rates = measure.gemm_rates("cpu", torch.float32, ((8, 16), (16, 8)), 4096)
    forms = 1 + can_pack(torch.ones(16, 8))  # the plain linear, and the packed one where there is one
    assert sum(done) == forms * sum(rates.values())
    assert rates[512] == 512 * rates[1]


def test_measuring_leaves_the_random_state_alone(monkeypatch):
    import torch

    from minillm.roofline import measure

    monkeypatch.setattr(
        measure,
        "bandwidths",
        lambda where: {k: [float(torch.rand(()) + 1)] for k in ("read", "copy", "triad", "gather")},
    )
    monkeypatch.setattr(measure, "gemm_rates", lambda *a, **k: {1: float(torch.rand(()) + 1)})
    monkeypatch.setattr(measure, "peak_flops", lambda *a, **k: [float(torch.rand(()) + 2)])
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = measure.measure("cpu")
    assert torch.equal(torch.rand(3), expected)
    assert found.source == "measured"


# Fit ----------------------------------------------------------------------------------------------------------------


def grid():
    return [[(1, c)] * b for b in (1, 2, 4, 8, 16, 32) for c in (64, 256, 1024)] + [[(n, 0)] for n in (16, 64, 256)]


def noisy(truth, where, seed=0, noise=0.03):
    """Steps of a machine that reaches only parts of its ceilings."""
    import random

    rng = random.Random(seed)
    machine_fit = fit.Fit(truth)
    steps = [cost.step(SMOL, rows) for rows in grid()]
    return [(ops, machine_fit.seconds(ops, where, "bfloat16") * rng.uniform(1 - noise, 1 + noise)) for ops in steps]


def test_a_fit_predicts_shapes_it_never_saw():
    where = machine()
    truth = {"linear": 1.2, "attention": 3.0, "elementwise": 1.5, "calls": 2.5}
    samples = noisy(truth, where)
    found = fit.fit(samples[::2], where, "bfloat16")
    assert found.median_error(samples[1::2], where, "bfloat16") < 0.05
    assert found.factors["attention"] == pytest.approx(3.0, rel=0.2)
    unfitted = fit.Fit(dict.fromkeys(fit.FEATURES, 1.0))
    assert unfitted.median_error(samples[1::2], where, "bfloat16") > 0.15  # and without the fit they are missed


def test_factors_are_never_negative_and_too_few_shapes_are_refused():
    where = machine()
    samples = noisy({"linear": 1.0, "attention": 0.0, "elementwise": 0.0, "calls": 0.0}, where, noise=0.1)
    assert min(fit.fit(samples, where, "bfloat16").factors.values()) >= 0
    with pytest.raises(MinillmError, match="needs as many"):
        fit.fit(samples[:3], where, "bfloat16")


# Mutations ----------------------------------------------------------------------------------------------------------


def test_flipping_max_to_min_is_caught(monkeypatch):
    monkeypatch.setattr(predict, "max", min, raising=False)
    with pytest.raises(AssertionError):
        test_one_operator_is_the_larger_of_its_times_plus_its_calls()
    with pytest.raises(AssertionError):
        test_decode_of_an_8b_model_on_an_h200_reads_its_weights()


def test_a_swapped_classifier_is_caught(monkeypatch):
    real = predict.bound
    monkeypatch.setattr(predict, "bound", lambda *a: "memory" if real(*a) == "compute" else "compute")
    with pytest.raises(AssertionError):
        test_the_classifier_flips_with_batch_and_with_context()


def test_the_fit_is_the_non_negative_least_squares_of_scipy(monkeypatch):
    import numpy as np
    from scipy.optimize import nnls

    monkeypatch.setattr(fit, "features", lambda ops, where, dtype: np.array(ops))
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, s = rng.random((9, 4)) * rng.random(4), rng.random(9) + 0.1
        found = fit.fit(list(zip(a, s, strict=True)), machine(), "bfloat16").factors
        expected = nnls(a / s[:, None], np.ones(9))[0]
        assert list(found.values()) == pytest.approx(expected.tolist(), abs=1e-9 * max(1.0, expected.max()))


def test_a_busy_machine_costs_samples_not_minutes(monkeypatch):
    from minillm.roofline import measure

    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    slow, quick = (lambda: now.__setitem__(0, now[0] + 1.0)), (lambda: now.__setitem__(0, now[0] + 0.01))
    assert measure.seconds(slow, "cpu", 8) == [1.0, 1.0]
    assert len(measure.seconds(quick, "cpu", 8)) == 8


def test_ceilings_say_when_the_machine_was_busy(monkeypatch):
    from minillm.roofline import measure

    assert not machine().busy
    assert not machine(spread={"processor share": {"median": 0.97}}).busy
    assert machine(spread={"processor share": {"median": 0.5}}).busy
    walls, cpus = iter([0.0, 2.0]), iter([0.0, 3.0])  # two threads, two seconds, three of four thread seconds
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(walls))
    monkeypatch.setattr(measure.time, "process_time", lambda: next(cpus))
    assert measure.processor_share(2) == pytest.approx(0.75)


def test_a_captured_step_pays_for_one_launch():
    """Everything else stays: the difference is all calls but one."""
    here = dataclasses.replace(DATASHEET["h200"], call_overhead=5e-6)
    eager, graph = (predict.predict_step(LLAMA, [(1, 511)], here, captured=c) for c in (False, True))
    calls = cost.total(cost.step(LLAMA, [(1, 511)])).calls
    assert eager.expected - graph.expected == pytest.approx((calls - 1) * here.call_overhead)
    assert eager.lower == graph.lower
