"""Restore or recompute: the choice flips where the two formulas cross, and what is observed moves the rates."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import MinillmError
from minillm.models.presets import preset
from minillm.roofline import device as devices
from minillm.roofline import measure, restore
from minillm.roofline.device import DATASHEET, Device
from minillm.roofline.predict import predict_step
from minillm.roofline.restore import Choice, RestoreModel, cheaper, recompute_seconds, restore_seconds

SMOL = preset("smollm2-135m")
LLAMA = preset("llama-3.1-8b")
H200 = DATASHEET["h200"]
HERE = Device(
    name="two cores", kind="cpu", peak_flops={"float32": 200e9, "bfloat16": 400e9}, read_bandwidth=35e9,
    copy_bandwidth=30e9, triad_bandwidth=32e9, gather_bandwidth=25e9, memory_bytes=24 << 30, call_overhead=2e-6,
    source="measured",
)  # fmt: skip
BLOCK = 16 * 2 * 30 * 192 * 2  # bytes of 16 tokens of SmolLM2-135M in bf16


def model(device=HERE, **changes) -> RestoreModel:
    how = {"dtype": "bfloat16", "block_size": 16, "block_bytes": BLOCK, "chunk": 512} | changes
    return RestoreModel(SMOL, device, **how)


# The formulas


def test_recompute_is_the_sum_of_its_chunks():
    parts = [(512, 100), (512, 612), (276, 1124)]
    expected = sum(predict_step(SMOL, [row], HERE, "bfloat16").expected for row in parts)
    assert recompute_seconds(SMOL, 1300, HERE, context_before=100, chunk=512) == pytest.approx(expected, rel=1e-12)
    assert recompute_seconds(SMOL, 0, HERE) == 0.0
    assert recompute_seconds(LLAMA, 1, H200, weights_as="int8") < recompute_seconds(LLAMA, 1, H200)
    for wrong in ({"tokens": -1}, {"tokens": 1, "context_before": -1}, {"tokens": 1, "chunk": 0}):
        with pytest.raises(MinillmError):
            recompute_seconds(SMOL, device=HERE, **wrong)


def test_a_copy_takes_its_latency_and_its_bytes():
    assert restore_seconds(3e9, 1.5e9, 0.25) == 2.25
    assert restore_seconds(0, 1.5e9, 0.25) == 0.25
    for wrong in ((1, 0), (1, -1), (-1, 1), (1, 1, -1), (1, math.nan)):
        with pytest.raises(MinillmError):
            restore_seconds(*wrong)


def test_a_tie_is_recomputed_and_every_term_is_shown():
    choice = cheaper(3.0, write_s=1.0, read_s=1.5, tail_s=0.5)
    assert choice == Choice("recompute", 3.0, 3.0, {"recompute": 3.0, "write": 1.0, "read": 1.5, "tail": 0.5})
    assert cheaper(3.0, write_s=1.0, read_s=1.4, tail_s=0.5).how == "swap"
    assert cheaper(3.0, read_s=2.9).how == "swap"


# The crossover


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 4096), context=st.integers(0, 4096), latency=st.sampled_from([0.0, 1e-5]))
def test_the_choice_flips_at_the_bandwidth_where_the_formulas_cross(tokens, context, latency):
    recompute = recompute_seconds(LLAMA, tokens, H200, context_before=context)
    nbytes = 131072 * tokens
    crossing = 2 * nbytes / (recompute - 2 * latency)  # out and back in
    for factor, how in ((1 + 1e-9, "swap"), (1 - 1e-9, "recompute")):
        one_way = restore_seconds(nbytes, crossing * factor, latency)
        assert cheaper(recompute, write_s=one_way, read_s=one_way).how == how
        # Leaving the write out moves the crossing to half the bandwidth: this test would see it.
        assert cheaper(recompute, read_s=one_way).how == "swap"


@pytest.mark.parametrize("crossing", [100, 400])
def test_the_choice_flips_once_as_the_context_grows(crossing):
    """Attention makes recomputing grow faster than the bytes: from some length on, copying wins and keeps winning."""
    m = model()
    tail = lambda n: recompute_seconds(SMOL, 1, HERE, context_before=16 * n)
    # The link that makes both equal at so many blocks, and how much slower it is than the one assumed.
    per_block = (recompute_seconds(SMOL, 16 * crossing + 1, HERE) - tail(crossing)) / (2 * crossing) * (1 - 1e-9)
    for write in (True, False):
        for _ in range(9):
            m.observe_copy("host", 7, 7 * per_block, write=write)
    choices = {n: m.preemption(n, tail=1) for n in [*range(32, 800, 32), crossing - 1, crossing]}
    for n, choice in choices.items():
        assert choice.recompute_s == pytest.approx(recompute_seconds(SMOL, 16 * n + 1, HERE), rel=1e-9)
        assert choice.swap_s == pytest.approx(2 * n * per_block + tail(n), rel=1e-9)
        assert choice.how == ("swap" if n >= crossing else "recompute"), n


def test_only_what_is_not_in_the_tier_already_is_written():
    m = model()
    whole, half, none = (m.preemption(8, stored=s).terms for s in (0, 4, 8))
    assert none["write"] == 0
    assert half["write"] == pytest.approx(whole["write"] / 2)
    assert whole["read"] == half["read"] == none["read"]
    # A copy moves its bytes twice through a CPU's memory: half of the 30 GB/s at which that memory copies.
    assert whole["read"] == pytest.approx(8 * BLOCK / 15e9 + 8 * restore.HOST_LATENCY)
    count, choice = m.restoring(["host"] * 8)
    assert (count, choice.how) == (8, "swap")
    assert choice.terms["write"] == 0
    assert choice.terms["read"] == pytest.approx(none["read"])


def test_tokens_that_are_computed_anyway_count_on_both_sides():
    """A few tokens cost a GPU no more than one, since the weights are read for that one: no copy is worth it then."""
    how = {"dtype": "bfloat16", "block_size": 16, "block_bytes": 131072 * 16, "chunk": 512}
    m = RestoreModel(LLAMA, H200, **how)
    assert m.restoring(["host"], context_before=64, tail=0)[0] == 1
    assert m.restoring(["host"], context_before=64, tail=1)[0] == 0
    assert m.restoring(["host"] * 256, tail=1)[0] == 256, "of many tokens the arithmetic is the limit"


def test_a_block_that_leaves_is_judged_as_one_of_a_run():
    """Alone it would never return to a GPU, as above; and blocks come back in runs."""
    m = RestoreModel(LLAMA, H200, dtype="bfloat16", block_size=16, block_bytes=131072 * 16, chunk=512)
    assert m.restoring(["host"], context_before=64, tail=1)[0] == 0
    assert m.worth_keeping("host", context_before=64)
    for _ in range(9):
        m.observe_copy("host", 1, 0.1, write=False)
    assert not m.worth_keeping("host", context_before=64)
    assert not m.worth_keeping("disk", context_before=64), "this GPU computes faster than a drive reads"
    assert model().worth_keeping("disk", context_before=64)


def test_a_run_is_restored_up_to_the_tier_that_is_too_slow():
    m = model()
    for _ in range(9):
        m.observe_copy("disk", 1, 100.0, write=False)
    assert m.restoring(["host"] * 4 + ["disk"] * 4)[0] == 4
    assert m.restoring(["disk"] * 4 + ["host"] * 4)[0] == 0
    count, choice = m.restoring(["disk"] * 8)
    assert (count, choice.how) == (0, "recompute")
    assert m.restoring([])[0] == 0
    fresh = model()
    assert fresh.restoring(["host"] * 4 + ["disk"] * 4)[0] == 8


@settings(max_examples=40, deadline=None)
@given(
    tiers=st.lists(st.sampled_from(["host", "disk"]), max_size=12),
    context=st.integers(0, 40),
    tail=st.integers(0, 3000),
    slow=st.floats(1e-6, 1.0),
)
def test_no_cut_between_tiers_costs_less(tiers, context, tail, slow):
    m = model()
    for _ in range(9):
        m.observe_copy("disk", 1, slow, write=False)
    count, choice = m.restoring(tiers, context_before=16 * context, tail=tail)
    cuts = [0, *(i for i in range(1, len(tiers)) if tiers[i] != tiers[i - 1]), len(tiers)]
    assert count in cuts

    def cost(k):
        rest = 16 * (len(tiers) - k) + min(tail, 512)
        computed = recompute_seconds(SMOL, rest, HERE, context_before=16 * (context + k))
        return computed + sum(m.copy_seconds(t, 1, write=False) for t in tiers[:k])

    assert cost(count) == pytest.approx(min(map(cost, cuts)))
    assert choice.recompute_s == pytest.approx(cost(0))
    assert choice.swap_s == pytest.approx(min(map(cost, cuts[1:])))
    assert choice.how == ("swap" if count else "recompute")


# Learning


@pytest.mark.parametrize("factor", [0.01, 0.5, 3.0, 1000.0])
def test_four_agreeing_observations_move_a_rate_to_what_is_seen(factor):
    m = model()
    predicted = recompute_seconds(SMOL, 300, HERE)
    copied = m.copy_seconds("host", 8, write=True)
    for _ in range(4):
        m.observe_prefill(300, factor * predicted)
        m.observe_copy("host", 8, factor * copied, write=True)
    assert m.recompute_seconds(300) == pytest.approx(factor * predicted)
    assert m.recompute_seconds(2000, 100) == pytest.approx(
        factor * recompute_seconds(SMOL, 2000, HERE, context_before=100)
    )
    assert m.copy_seconds("host", 8, write=True) == pytest.approx(factor * copied)
    assert m.copy_seconds("host", 8, write=False) == pytest.approx(copied), "each direction has its own rate"


@settings(max_examples=60, deadline=None)
@given(
    seen=st.lists(st.floats(0.9, 1.1), max_size=20),
    outlier=st.one_of(st.floats(1e-9, 1e-3), st.floats(1e3, 1e9)),
    at=st.integers(0, 20),
)
def test_one_outlier_moves_no_rate_out_of_what_the_others_say(seen, outlier, at):
    m = model()
    predicted = recompute_seconds(SMOL, 300, HERE)
    for ratio in [*seen[:at], outlier, *seen[at:]]:
        m.observe_prefill(300, ratio * predicted)
        assert 0.899 < m.recompute_seconds(300) / predicted < 1.101


def test_a_mean_would_be_flipped_by_one_outlier(monkeypatch):
    """The mutation that the test above must notice."""
    import statistics

    monkeypatch.setattr(restore, "median", statistics.fmean)
    m = model()
    predicted = recompute_seconds(SMOL, 300, HERE)
    m.observe_prefill(300, 1e6 * predicted)
    assert m.recompute_seconds(300) > 1.1 * predicted


def test_what_is_observed_flips_the_choice():
    m = model()
    assert m.preemption(8).how == "swap"
    for _ in range(4):
        m.observe_copy("host", 8, 10.0, write=True)
    assert m.preemption(8).how == "recompute"
    assert m.restoring(["host"] * 8)[0] == 8, "reading back is as fast as before"
    for _ in range(4):
        m.observe_prefill(128, 1000.0)
    assert m.preemption(8).how == "swap"


def test_a_tier_that_was_slow_once_is_tried_again():
    """What is not used is not measured: after many refusals its rate is taken for unknown again."""
    m = model()
    for _ in range(9):
        m.observe_copy("disk", 1, 100.0, write=False)
    tried = [m.restoring(["disk"] * 4)[0] for _ in range(restore.REFUSALS + 1)]
    assert tried == [0] * restore.REFUSALS + [4]
    for _ in range(9):
        m.observe_copy("host", 1, 100.0, write=True)
    tried = [m.preemption(4).how for _ in range(restore.REFUSALS + 1)]
    assert tried == ["recompute"] * restore.REFUSALS + ["swap"]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_not_learned_from(seconds):
    m = model()
    before = m.to_dict()
    for _ in range(9):
        m.observe_prefill(10, seconds)
        m.observe_step([(1, 7), (3, 0)], seconds)
        m.observe_copy("host", 3, seconds, write=True)
        m.observe_prefill(0, 1.0)
        m.observe_copy("host", 0, 1.0, write=True)
    assert m.to_dict() == before


def test_mixed_steps_are_observed_as_they_were():
    m = model()
    rows = [(1, 700), (1, 30), (200, 0)]
    for _ in range(4):
        m.observe_step(rows, 2 * predict_step(SMOL, rows, HERE).expected)
    assert m.recompute_seconds(64) == pytest.approx(2 * recompute_seconds(SMOL, 64, HERE))


# Where the rates come from


def test_measured_ceilings_are_used_where_they_are_known_and_never_made(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "measure", lambda *a: pytest.fail("an engine must not measure at its start"))
    how = {"dtype": "bfloat16", "block_size": 16, "block_bytes": BLOCK}
    unknown = RestoreModel.for_machine(SMOL, "cpu", **how)
    assert "default" in unknown.source
    assert "minillm doctor" in unknown.source
    assert unknown.preemption(64).how in ("swap", "recompute")
    found = dataclasses.replace(HERE, identity=measure.identity("cpu"))
    monkeypatch.setattr(devices, "_cached", lambda identity: found if identity == found.identity else None)
    known = RestoreModel.for_machine(SMOL, "cpu", **how)
    assert "measured" in known.source
    assert "two cores" in known.source
    assert known.recompute_seconds(100) == pytest.approx(recompute_seconds(SMOL, 100, HERE))


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", None), ("Some GPU", None),
    ],
)  # fmt: skip
def test_a_gpu_that_was_not_measured_is_looked_up_by_name(name, sheet):
    assert restore.datasheet_of(name) is (None if sheet is None else DATASHEET[sheet])


@pytest.mark.parametrize(("name", "says"), [("NVIDIA H200", "datasheet"), ("Some GPU", "default")])
def test_without_ceilings_a_gpu_has_a_datasheet_or_a_default(monkeypatch, name, says):
    monkeypatch.setattr(restore, "cached_machine", lambda where: None)
    monkeypatch.setattr(restore, "_gpu_name", lambda where: name)
    m = RestoreModel.for_machine(LLAMA, "cuda", dtype="bfloat16", block_size=16, block_bytes=131072 * 16)
    assert says in m.source
    assert m.preemption(4).recompute_s > 0


def test_a_dtype_that_was_not_measured_is_no_error():
    """The slowest that was measured stands in: a pool of fp16 on a CPU whose ceilings lack it."""
    m = model(dtype="float16")
    assert m.recompute_seconds(64) > 0
    assert "float16" in m.source


@pytest.mark.parametrize("wrong", [{"blocks": -1}, {"blocks": 1, "stored": 2}, {"blocks": 1, "tier": "tape"}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(MinillmError):
        model().preemption(**wrong)


def test_nothing_to_keep_is_recomputed():
    assert model().preemption(0).how == "recompute"


def test_a_decision_predicts_few_steps(monkeypatch):
    """So that it fits into a step: no chunk is predicted twice, and a long rest of the prompt only up to one chunk."""
    calls = []
    step = restore.predict_step
    monkeypatch.setattr(restore, "predict_step", lambda *a, **k: (calls.append(a[1]), step(*a, **k))[1])
    m = model()
    m.restoring(["host"] * 32, tail=100_000)
    assert len(calls) <= 4
    m.restoring(["host"] * 32, tail=90_000)
    assert len(calls) <= 4
