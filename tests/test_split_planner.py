"""The split planner says no where it should, and why (F4), and yes where it pays; terms of a migration (E6); sweeps."""

import dataclasses
import itertools
import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.cli import main
from minillm.cluster import split_reasons as why
from minillm.cluster.goodput import colocated, goodput, split
from minillm.cluster.migration import BUDGETS, Engine, Wire, crossover, migration, sweep
from minillm.cluster.pools import CLEAR, MARGIN, colocated_pool
from minillm.cluster.split_planner import break_even, coupling, over_load, plan_split
from minillm.cluster.step_times import Steps, Workload
from minillm.errors import MinillmError
from minillm.models.presets import preset
from minillm.roofline.comm import link
from minillm.roofline.device import device
from minillm.roofline.parallel import predict_parallel, rank_memory
from minillm.roofline.predict import predict_step
from minillm.roofline.restore import recompute_seconds
from minillm.trace.latency import SLO

H200 = dataclasses.replace(device("h200"), call_overhead=2e-6)
ENGINE = Engine(preset("llama-3.1-8b"), H200)
WIRE = Wire(50e9, 1e-5)
LOAD, TIGHT = Workload(4097, 256), SLO(ttft_s=2.0, tpot_s=0.0065)


def codes(plan):
    return [r.code for r in plan.reasons]


# Yes -----------------------------------------------------------------------------------------------------------------


def test_long_prompts_and_a_tight_tpot_make_a_split_pay():
    plan = plan_split(ENGINE, 4, LOAD, TIGHT, WIRE)
    assert plan.pays
    assert plan.gain > 1.3
    assert plan.best.name == "2P2D"
    assert plan.best.bottleneck == "prefill"
    assert plan.colocated.bottleneck == "steps"
    assert plan.reasons == ()
    assert "2P2D" in plan.words


def test_good_chunks_win_where_a_call_costs_nothing():
    """The honest baseline: on an ideal roofline a mixed step hides arithmetic behind bytes: nothing to be won."""
    ideal = dataclasses.replace(ENGINE, device=device("h200"))
    plan = plan_split(ideal, 4, LOAD, SLO(ttft_s=2.0, tpot_s=0.01), WIRE)
    assert not plan.pays
    assert plan.gain < 0.9
    assert codes(plan) == [why.CHUNKS]
    # with large chunks only, the same machine would have looked as if it had to be split
    poor = dataclasses.replace(ideal, budgets=(8192,))
    assert plan_split(poor, 4, LOAD, SLO(ttft_s=2.0, tpot_s=0.01), WIRE, explain=False).gain > plan.gain


def test_the_baseline_may_take_small_chunks():
    """Where a call costs nothing a chunk of 128 fits beside the decodes; a baseline that may not take it looks poor."""
    ideal = dataclasses.replace(ENGINE, device=device("h200"))
    coarse = dataclasses.replace(ideal, budgets=(512, 2048, 8192))
    assert min(BUDGETS) == 64
    assert [plan_split(e, 4, LOAD, TIGHT, WIRE, explain=False).pays for e in (coarse, ideal)] == [True, False]
    # what a call costs is a reason that chunks do not take away
    real = dataclasses.replace(ENGINE, budgets=coarse.budgets)
    gains = [plan_split(e, 4, LOAD, TIGHT, WIRE, explain=False).gain for e in (real, ENGINE)]
    assert gains[1] == pytest.approx(gains[0], rel=0.02)
    assert min(gains) > 1.3


def test_what_is_within_the_models_error_is_not_decided(capsys):
    """Over quicker and quicker links: no, perhaps not, perhaps, yes."""
    sides = []
    for bandwidth in (4e9, 5.5e9, 6e9, 8e9):
        plan = plan_split(ENGINE, 4, LOAD, TIGHT, Wire(bandwidth, 1e-4))
        assert plan.clear == (abs(plan.gain - 1 - MARGIN) > CLEAR) == ("too close to call" not in plan.words)
        assert plan.to_dict()["clear"] == plan.clear
        assert ("measure both" in plan.words) == (not plan.clear)
        sides.append((plan.pays, plan.clear))
    assert sides == [(False, True), (False, False), (True, False), (True, True)]
    idle = plan_split(ENGINE, 4, dataclasses.replace(LOAD, rate=10.0), TIGHT, WIRE)
    assert (idle.gain, idle.clear) == (1.0, True)  # 18 are held: no is clear
    near = plan_split(ENGINE, 4, dataclasses.replace(LOAD, rate=0.95 * idle.colocated.goodput), TIGHT, WIRE)
    assert (near.gain, near.clear) == (1.0, False)
    assert main([*ARGS[:2], "--engines", "4", *ARGS[4:8], "--call-overhead", "2", "--bandwidth", "6"]) == 0
    assert "yes, perhaps: too close to call" in capsys.readouterr().out


def test_words_compare_what_is_served_of_what_comes():
    """Of 24 that come both serve what they can: the ratio is of that, and not of two capacities."""
    plan = plan_split(ENGINE, 4, dataclasses.replace(LOAD, rate=24.0), TIGHT, WIRE)
    assert plan.gain == pytest.approx(24 / plan.colocated.goodput)
    assert f"{plan.gain:.2f} times as many of the 24 that come" in plan.words
    assert "such engines" not in plan.words
    none = plan_split(ENGINE, 4, dataclasses.replace(LOAD, rate=60.0), TIGHT, WIRE)
    more = int(re.search(r"60 come: that takes about (\d+) such engines", none.words)[1])
    enough, less = (plan_split(ENGINE, n, LOAD, TIGHT, WIRE, explain=False).best.goodput for n in (more, more - 2))
    assert enough > 0.9 * 60 > 0.9 * less


# No, and why (F4): each differs from the yes above in one thing ------------------------------------------------------


def test_no_at_low_load():
    plan = plan_split(ENGINE, 4, dataclasses.replace(LOAD, rate=5.0), TIGHT, WIRE)
    assert (plan.pays, plan.gain, codes(plan)) == (False, 1.0, [why.LOADS])
    at = plan.reasons[0].would_pay_at
    assert at > plan.colocated.goodput > 5
    busy = dataclasses.replace(LOAD, rate=1.01 * at)
    assert plan_split(ENGINE, 4, busy, TIGHT, WIRE, explain=False).pays


def test_no_for_short_prompts():
    short = Workload(200, 256)
    plan = plan_split(ENGINE, 4, short, TIGHT, WIRE)
    assert not plan.pays
    assert why.PROMPTS in codes(plan)
    (reason,) = [r for r in plan.reasons if r.code == why.PROMPTS]
    longer = Workload(int(reason.would_pay_at), 256)
    assert plan_split(ENGINE, 4, longer, TIGHT, WIRE, explain=False).pays


def test_no_over_a_weak_network():
    weak = Wire(1e9, 1e-4)
    plan = plan_split(ENGINE, 4, LOAD, TIGHT, weak)
    assert (plan.pays, codes(plan)) == (False, [why.LINKS])
    assert plan.best.bottleneck == "link"
    (reason,) = plan.reasons
    assert reason.latency_s is None
    better = dataclasses.replace(weak, bandwidth=reason.would_pay_at)  # and the latency as it is
    assert plan_split(ENGINE, 4, LOAD, TIGHT, better, explain=False).pays


@pytest.mark.parametrize(("wire", "eased"), [
    (Wire(5e9, 1e-4), "bandwidth"),
    (Wire(50e9, 1.0), "latency"),
    (Wire(5e9, 1.0), "both"),
])  # fmt: skip
def test_of_a_weak_network_what_is_weak_is_said(wire, eased):
    """What it says of the link is enough, and where it names both neither is enough alone."""
    plan = plan_split(ENGINE, 4, LOAD, TIGHT, wire)
    assert codes(plan) == [why.LINKS]
    (reason,) = plan.reasons
    assert ("GB/s" in reason.words.split("would pay")[1]) == (eased != "latency") == (reason.would_pay_at is not None)
    assert ("latency" in reason.words) == (eased != "bandwidth") == (reason.latency_s is not None)
    change = {"bandwidth": reason.would_pay_at, "latency_s": reason.latency_s}
    change = {k: v for k, v in change.items() if v is not None}
    better = dataclasses.replace(wire, **change)
    assert plan_split(ENGINE, 4, LOAD, TIGHT, better, explain=False).pays
    for one in change if eased == "both" else ():
        alone = dataclasses.replace(wire, **{one: change[one]})
        assert not plan_split(ENGINE, 4, LOAD, TIGHT, alone, explain=False).pays


def test_no_in_a_small_pool():
    load, slo = Workload(1032, 256), SLO(ttft_s=2.0, tpot_s=0.0047)
    plan = plan_split(ENGINE, 2, load, slo, WIRE)
    assert not plan.pays
    assert why.POOLS in codes(plan)
    (reason,) = [r for r in plan.reasons if r.code == why.POOLS]
    assert plan_split(ENGINE, int(reason.would_pay_at), load, slo, WIRE, explain=False).pays
    alone = plan_split(ENGINE, 1, load, slo, WIRE)
    assert (alone.best, codes(alone)) == (None, [why.POOLS])
    assert "at least two engines" in alone.words


def test_bounds_that_nobody_meets_are_said():
    plan = plan_split(ENGINE, 2, LOAD, SLO(ttft_s=0.01, tpot_s=0.0065), WIRE)
    assert codes(plan) == [why.REACH]
    assert plan.colocated.bottleneck == "ttft alone"
    plan = plan_split(ENGINE, 2, LOAD, SLO(ttft_s=2.0, tpot_s=0.001), WIRE)
    assert codes(plan) == [why.REACH]
    assert plan.colocated.bottleneck == "tpot alone"


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    m=st.sampled_from([300, 2049, 5000]), n=st.sampled_from([32, 200]), engines=st.integers(2, 4),
    tpot=st.sampled_from([0.005, 0.02]), rate=st.sampled_from([None, 4.0]),
)  # fmt: skip
def test_a_plan_is_consistent(m, n, engines, tpot, rate):
    plan = plan_split(ENGINE, engines, Workload(m, n, rate), SLO(ttft_s=1.0, tpot_s=tpot), WIRE, explain=False)
    assert sorted((p.prefill, p.decode) for p in plan.splits) == [(p, engines - p) for p in range(1, engines)]
    assert [p.goodput for p in plan.splits] == sorted((p.goodput for p in plan.splits), reverse=True)
    assert plan.pays == (plan.gain >= 1 + MARGIN)
    for pool in (plan.colocated, *plan.splits):
        assert pool.goodput <= min(pool.forecast.limits.values())
        assert pool.goodput == 0 or pool.forecast.attained >= 0.9
    json.dumps(plan.to_dict(), allow_nan=False)


# Limits of an engine --------------------------------------------------------------------------------------------------


def test_what_is_full_is_named_by_what_would_help():
    """Where max_num_seqs is taken and memory is left, more memory would not help. And the other way round."""
    load = Workload(64, 256)
    for changes, name in (({"kv_tokens": 12_800}, "seats"), ({"kv_tokens": 6400}, "kv")):
        changes |= {"max_num_seqs": 32 if name == "seats" else 256}
        engine = dataclasses.replace(ENGINE, budgets=(1024,), **changes)
        plan = plan_split(engine, 2, load, SLO(ttft_s=1.0, tpot_s=0.05), WIRE)
        assert {p.bottleneck for p in (plan.colocated, *plan.splits)} == {name}
        fewer = dataclasses.replace(engine, max_num_seqs=engine.max_num_seqs // 2)
        long = plan_split(fewer, 3, Workload(32, 1024), plan.slo, WIRE, explain=False)  # nearly all of it is decode
        assert {p.bottleneck for p in long.splits} == {name}
        assert codes(plan) == [why.ROOM]
        for eased, gains in (({"max_num_seqs": 2 * engine.max_num_seqs}, name == "seats"),
                             ({"kv_tokens": 2 * engine.kv_tokens}, name == "kv")):  # fmt: skip
            steps = Steps(dataclasses.replace(engine, **eased), load)
            more = colocated_pool(steps, 2, plan.slo).goodput / plan.colocated.goodput
            assert (more > 1.2) == gains
            assert gains or more == pytest.approx(1)


def test_a_prompt_within_a_block_has_nothing_to_move():
    plan = plan_split(ENGINE, 2, Workload(16, 256), SLO(ttft_s=1.0, tpot_s=0.02), WIRE)
    assert codes(plan) == [why.PROMPTS]
    assert "16 tokens lies within a block of 16" in plan.words


@pytest.mark.parametrize(("load", "kv", "message"), [
    (Workload(131_000, 256), None, "longer than the model's limit of 131072 tokens"),
    (Workload(2048, 256), 2303, "longer than an engine's KV cache of 2288 tokens"),
])  # fmt: skip
def test_requests_that_no_engine_can_serve_are_refused(load, kv, message):
    with pytest.raises(MinillmError, match=message):
        plan_split(dataclasses.replace(ENGINE, kv_tokens=kv), 2, load, TIGHT, WIRE)


LARGE = Engine(preset("llama-3.1-70b"), H200, tp=4, tp_link=link("nvlink4"))


def test_engines_of_several_devices():
    """Steps and room are those of the ranks; KV is moved once, by chunks: no rank has all heads of a layer."""
    assert LARGE.capacity == rank_memory(LARGE.config, H200, tp=4).kv_tokens // 16 * 16
    for rows in ([(1, 2000)] * 8, [(512, 0), (1, 2000)]):
        step = predict_parallel(LARGE.config, rows, H200, tp=4, tp_link=link("nvlink4"))
        assert LARGE.seconds(rows) == step.expected
        assert step.all_reduce > 0
    moved = migration(LARGE, 4097, WIRE, prefill_s=0.2)
    assert moved.bytes == 4096 * 2 * 80 * 8 * 128 * 2
    assert moved.layout_s == pytest.approx(moved.bytes / H200.copy_bandwidth)  # four devices copy, each its heads
    assert moved.hidden_s == pytest.approx(moved.bytes / WIRE.bandwidth * (1 - 1 / 3))
    plan = plan_split(LARGE, 4, LOAD, SLO(ttft_s=2.0, tpot_s=0.03), WIRE)
    assert (plan.pays, plan.best.name) == (True, "3P1D")


# The forecasts -------------------------------------------------------------------------------------------------------


def test_alone_a_request_takes_its_steps():
    steps = Steps(ENGINE, Workload(1000, 50))
    f = colocated(steps, 1, TIGHT, 1e-9, 512)
    first = sum(predict_step(ENGINE.config, [row], H200).expected for row in ((512, 0), (488, 512)))
    decode = predict_step(ENGINE.config, [(1, 1025)], H200, captured=True).expected
    assert f.ttft_s == pytest.approx(first, rel=1e-3)
    assert f.tpot_s == pytest.approx(decode, rel=1e-3)


def test_what_is_attained_falls_with_the_rate():
    steps = Steps(ENGINE, LOAD)
    for at in (
        lambda r: colocated(steps, 2, TIGHT, r, 2048),
        lambda r: split(steps, 1, 1, WIRE, TIGHT, r, 2048),
    ):
        rates = [1.5**k / 10 for k in range(16)]
        shares = [at(r).attained for r in rates]
        assert all(a >= b - 1e-6 for a, b in itertools.pairwise(shares))
        assert shares[0] > 0.99
        assert shares[-1] == 0


def test_the_longest_gap_is_a_full_chunks_step():
    slo = dataclasses.replace(TIGHT, tpot_s=0.05, itl_s=0.06)
    steps = Steps(ENGINE, LOAD)
    assert colocated(steps, 2, slo, 1.0, 512).tpot_ok > 0.9
    assert colocated(steps, 2, slo, 1.0, 8192).tpot_ok < 0.8  # some have somebody's prompt read while they write
    assert colocated(steps, 2, slo, 0.01, 8192).tpot_ok > 0.9  # unless hardly anybody comes
    assert colocated_pool(steps, 2, slo).budget < 8192


def test_no_bound_no_goodput():
    with pytest.raises(MinillmError, match="a bound on TTFT and one on TPOT"):
        plan_split(ENGINE, 2, LOAD, SLO(e2e_s=6.0), WIRE)
    with pytest.raises(MinillmError, match="from 1 to 64 engines"):
        plan_split(ENGINE, 0, LOAD, TIGHT, WIRE)
    with pytest.raises(MinillmError, match="without any limit"):
        goodput(lambda rate: dataclasses.replace(colocated(Steps(ENGINE, LOAD), 1, SLO(), rate, 512),
                                                 limits={"prefill": math.inf}))  # fmt: skip


# E6 ------------------------------------------------------------------------------------------------------------------


def test_a_migration_is_locate_transfer_layout_allocate():
    m = migration(ENGINE, 4097, WIRE)
    assert (m.tokens, m.bytes) == (4096, 4096 * 2 * 32 * 8 * 128 * 2)
    assert (m.locate_s, m.allocate_s) == (2e-5, 2e-5)
    assert m.transfer_s == pytest.approx(1e-5 + m.bytes / 50e9)
    assert m.layout_s == pytest.approx(4 * m.bytes / 4.8e12)
    assert m.total_s == pytest.approx(m.locate_s + m.transfer_s + m.layout_s + m.allocate_s)
    assert m.recompute_s == recompute_seconds(ENGINE.config, 4096, H200, chunk=2048)  # prompts are no CUDA graphs
    assert {"locate_s", "transfer_s", "layout_s", "allocate_s", "total_s", "worth"} <= m.to_dict().keys()


def test_whole_blocks_move_and_a_token_stays():
    assert [ENGINE.moved(t) for t in (1, 16, 17, 32, 33)] == [0, 0, 16, 16, 32]
    nothing = migration(ENGINE, 16, WIRE)
    assert (nothing.bytes, nothing.total_s, nothing.worth) == (0, 0.0, False)


def test_a_transfer_hides_behind_its_prefill_but_for_the_last_piece():
    prefill = 0.1
    hidden = migration(ENGINE, 4097, WIRE, prefill_s=prefill)
    sending = hidden.bytes / WIRE.bandwidth
    assert hidden.hidden_s == pytest.approx(sending * (1 - 1 / (32 * 3)))
    slow = migration(ENGINE, 4097, Wire(1e9), prefill_s=prefill)
    assert slow.hidden_s < prefill
    assert migration(ENGINE, 4097, dataclasses.replace(WIRE, overlap=False), prefill_s=prefill).hidden_s == 0


@pytest.mark.parametrize("tokens", [200, 2049, 9000])
def test_the_crossover_is_where_both_ways_cost_the_same(tokens):
    edge = crossover(ENGINE, tokens, WIRE)
    (row,) = sweep(ENGINE, [tokens], [edge], WIRE)
    assert row["total_s"] == pytest.approx(row["recompute_s"])
    below, above = sweep(ENGINE, [tokens], [edge / 1.01, edge * 1.01], WIRE)
    assert (below["worth"], above["worth"]) == (False, True)
    assert crossover(ENGINE, tokens, dataclasses.replace(WIRE, latency_s=10.0)) == math.inf


def test_an_engine_and_a_wire_are_judged():
    with pytest.raises(MinillmError, match=r"141.1 GB of weights a device, where 21.6 GB .* more of them an engine"):
        Engine(preset("llama-3.1-70b"), device("l4"))
    with pytest.raises(MinillmError, match="a KV cache of 10 tokens has no room for a block of 16"):
        dataclasses.replace(ENGINE, kv_tokens=10)
    with pytest.raises(MinillmError, match="sizes that do: 1, 2, 4, 8"):
        dataclasses.replace(ENGINE, tp=3)
    with pytest.raises(MinillmError, match="2 ranks are joined by something"):
        dataclasses.replace(ENGINE, tp=2).seconds([(1, 0)])
    for bad in ({"max_num_seqs": 0}, {"budgets": ()}, {"budgets": (0,)}, {"kv_tokens": True}):
        with pytest.raises(MinillmError, match="engine"):
            dataclasses.replace(ENGINE, **bad)
    with pytest.raises(MinillmError, match="bandwidth above 0"):
        Wire(0.0)
    for bad in ((0, 10), (10, 1)):
        with pytest.raises(MinillmError, match="workload"):
            Workload(*bad)


# Sweeps and the command ----------------------------------------------------------------------------------------------


def test_break_even_rows_are_the_plans():
    rows = break_even(ENGINE, 2, TIGHT, WIRE, [1e9, 50e9], [200, 4097], 256)
    assert [(r["prompt_tokens"], r["bandwidth"]) for r in rows] == [(200, 1e9), (200, 50e9), (4097, 1e9), (4097, 50e9)]
    assert [r["pays"] for r in rows] == [False, False, False, True]
    plan = plan_split(ENGINE, 2, LOAD, TIGHT, WIRE, explain=False)
    assert (rows[3]["gain"], rows[3]["split"], rows[3]["best"]) == (plan.gain, plan.best.goodput, "1P1D")


def test_over_load_shows_where_the_one_fails_and_the_other_does_not():
    plan = plan_split(ENGINE, 2, LOAD, TIGHT, WIRE, explain=False)
    here, there = plan.colocated.goodput, plan.best.goodput
    low, middle, high = over_load(ENGINE, 2, LOAD, TIGHT, WIRE, [here / 4, (here + there) / 2, 2 * there])
    assert min(low["colocated"]["ok"], low["split"]["ok"]) > 0.99
    assert middle["colocated"]["ok"] < 0.9 <= middle["split"]["ok"]
    assert max(high["colocated"]["ok"], high["split"]["ok"]) < 0.5
    assert middle["split"]["good"] == pytest.approx(middle["rate"] * middle["split"]["ok"])
    assert over_load(ENGINE, 1, LOAD, TIGHT, WIRE, [1.0])[0]["split"] is None


def test_coupled_capacities_by_prediction():
    """More prefill alone moves the pile from the input to the KV, more decode alone leaves it where it is."""
    engine = dataclasses.replace(ENGINE, kv_tokens=25_000)
    rows = coupling(engine, Workload(1025, 100, rate=70.0), WIRE, [(1, 1), (3, 1), (1, 3), (2, 3)], 1024)
    piles = [(r["input_queue"] > 0, r["kv_pile"] > 0) for r in rows]
    assert piles == [(True, False), (False, True), (True, False), (False, False)]
    assert rows[1]["kv_bytes_per_s"] == pytest.approx(rows[1]["kv_pile"] * 1024 * engine.kv_token_bytes)
    with pytest.raises(MinillmError, match="give the workload a rate"):
        coupling(engine, Workload(1025, 100), WIRE, [(1, 1)])


ARGS = [
    "plan",
    "split",
    "--engines",
    "2",
    "--prompt-tokens",
    "4097",
    "--slo",
    "ttft=2,tpot=0.0065",
    "--call-overhead",
    "8",
]


def test_the_command_says_yes_in_words_and_in_json(capsys):
    assert main(ARGS) == 0
    text = capsys.readouterr().out
    assert "yes: split into 1P1D" in text
    assert "locate" in text
    assert main([*ARGS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["pays"], found["splits"][0]["name"]) == (True, "1P1D")
    assert found["migration"]["bytes"] == 4096 * ENGINE.kv_token_bytes


def test_the_command_says_no_and_what_it_cannot(capsys):
    assert main([*ARGS, "--link", "eth25", "--bandwidth", "1"]) == 0
    out = capsys.readouterr().out
    assert "no: stay co-located" in out
    assert "weak network" in out
    assert main([*ARGS[:7], "ttft=0.001,tpot=0.001"]) == 1
    out = capsys.readouterr().out
    assert "no: no engines serve a request within the bounds. out of reach: even alone" in out
    assert " -  ttft alone" in out  # nobody runs at a goodput of none
    assert main([*ARGS, "--rate", "100"]) == 1
    assert re.search(r"100 come: that takes about \d+ such engines", capsys.readouterr().out)
    assert main([*ARGS[:2], "--engines", "1", "--confirm"]) == 2
    assert "at least 2 engines" in capsys.readouterr().err


def test_the_command_plans_engines_of_several_devices(capsys):
    ask = ["plan", "split", "--model", "llama-3.1-70b", "--slo", "ttft=2,tpot=0.03", "--prompt-tokens", "1500"]
    assert main([*ask, "--tensor-parallel-size", "2", "--tp-link", "pcie5"]) == 0
    text = capsys.readouterr().out
    assert "llama-3.1-70b in bfloat16 on 4 x NVIDIA H200 SXM, 2 an engine over PCIe 5.0 x16" in text
    assert "captures no CUDA graph" in text
    for more, message in (
        ([], "141.1 GB of weights a device"), (["--tp-link", "pcie5"], "say with --tensor-parallel-size"),
        (["--tensor-parallel-size", "3"], "sizes that do"), (["--tensor-parallel-size", "0"], "at least 1"),
    ):  # fmt: skip
        assert main([*ask, *more]) == 2
        assert message in capsys.readouterr().err


def test_the_help_says_what_the_columns_are(capsys):
    for plan, words in (("split", ("2P1D", "seats (--max-num-seqs)")), ("parallel", ("tp, pp, dp", "uncut"))):
        with pytest.raises(SystemExit):
            main(["plan", plan, "--help"])
        text = capsys.readouterr().out
        assert all(w in text.split("the table:")[1] for w in words)
