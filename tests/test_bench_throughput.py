"""`bench throughput`, `scheduler` and `nano`: their workloads, their judge, and runs as small as they get."""

import random
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_hf
from hypothesis import given
from hypothesis import strategies as st
from test_bench import FAST, options

from minillm.bench import common, judge, nano, peers, scheduler, throughput, workloads
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models.transformer import Transformer
from minillm.models.weights import random_weights
from minillm.roofline import gate, record
from minillm.roofline.cost import continuous, step, total
from minillm.roofline.predict import predict_generation, predict_serving

FAKE = Path(__file__).with_name("fake_peer.py")
NANO = ModelConfig(
    vocab_size=10_001, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16,
    max_position_embeddings=2048, dtype="float32",
)  # fmt: skip


@pytest.fixture
def quick(monkeypatch):
    for module in (throughput, scheduler, nano):
        monkeypatch.setattr(module, "ceilings", lambda o: FAST)
        monkeypatch.setattr(module, "ceilings_after", lambda o: {})
    monkeypatch.setattr(throughput, "read_bandwidth", lambda o: lambda: 1e14)
    monkeypatch.setitem(common.PRESETS, "small", NANO)


# Workloads ----------------------------------------------------------------------------------------------------------


def test_the_workloads_are_those_of_the_plan():
    o = common.Options(device="cpu")
    w1, w2, w3 = (workloads.make(name, o, 49152) for name in workloads.NAMES)
    assert len(w1.prompts) == 32
    assert all(32 <= n <= 256 for n in w1.prompt_tokens)
    assert all(32 <= n <= 128 for n in w1.new_tokens)
    assert len(set(w1.prompt_tokens)) > 20
    assert (w2.prompt_tokens, w2.new_tokens) == ([128], [64])
    assert (w3.prompt_tokens, w3.new_tokens) == ([544] * 16, [32] * 16)
    assert len({tuple(p[: w3.shared]) for p in w3.prompts}) == 1
    assert len({p[w3.shared] for p in w3.prompts}) > 10  # and not a token more
    assert w2.mean_batch == 1
    assert w3.mean_batch == 16


@pytest.mark.parametrize("name", workloads.NAMES)
def test_a_turn_draws_fresh_tokens_of_the_same_lengths(name):
    o = common.Options(device="cpu")
    first, again, next_turn = (workloads.make(name, o, 49152, turn) for turn in (3, 3, 4))
    assert first == again
    assert (first.prompt_tokens, first.new_tokens) == (next_turn.prompt_tokens, next_turn.new_tokens)
    assert all(a != b for a, b in zip(first.prompts, next_turn.prompts, strict=True))
    other = workloads.make("W1", common.Options(device="cpu", seed=1), 49152)
    assert other.prompt_tokens != workloads.make("W1", o, 49152).prompt_tokens


def test_nano_has_the_totals_that_are_published():
    work = workloads.nano()
    assert len(work.prompts) == 256
    assert sum(work.prompt_tokens) == 142_827
    assert sum(work.new_tokens) == 133_966
    few = workloads.nano(3)
    assert (few.prompts, few.new_tokens) == (work.prompts[:3], work.new_tokens[:3])
    assert sum(workloads.nano(seed=1).prompt_tokens) != 142_827


# The roofline of a running batch --------------------------------------------------------------------------------------

REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=8)


@given(REQUESTS, st.integers(1, 24), st.integers(1, 6), st.integers(0, 20))
def test_a_schedule_computes_every_token_once_within_its_limits(requests, budget, seqs, shared):
    prompts, new = [max(p, shared + 1) for p, _ in requests], [n for _, n in requests]
    steps = continuous(prompts, new, budget, seqs, shared)
    assert all(sum(n for n, _ in rows) <= budget and 1 <= len(rows) <= seqs for rows, _ in steps)
    assert sum(tokens for _, tokens in steps) == sum(new)
    computed = sum(n for rows, _ in steps for n, _ in rows)
    whole = sum(p + n - 1 for p, n in zip(prompts, new, strict=True))
    assert whole - shared * (len(prompts) - 1) <= computed <= whole
    if not shared:
        assert computed == whole


def test_a_shared_prompt_is_computed_once_where_the_budget_lets_others_wait_for_it():
    steps = continuous([544] * 16, [32] * 16, 512, 32, shared=512)
    assert steps[0] == ([(512, 0)], 0)
    assert steps[1] == ([(32, 512)] * 16, 16)
    assert steps[2] == ([(1, 544)] * 16, 16)
    assert len(steps) == 2 + 31


def test_one_request_alone_is_a_plain_generation():
    one = predict_serving(NANO, [37], [9], FAST, "float32", budget=64, seqs=4)
    plain = predict_generation(NANO, [37], 9, FAST, "float32")
    assert one.expected == pytest.approx(plain.expected)
    assert one.lower == pytest.approx(plain.lower)
    assert one.flops == plain.flops


@given(REQUESTS, st.integers(4, 64), st.integers(1, 8))
def test_the_lower_bound_holds_for_every_schedule(requests, budget, seqs):
    """No schedule that can be written down is faster than the bound, even if each of its steps reaches its roof."""
    from minillm.roofline.predict import predict

    prompts, new = [p for p, _ in requests], [n for _, n in requests]
    bound = predict_serving(NANO, prompts, new, FAST, "float32", budget=16, seqs=2).lower
    steps = continuous(prompts, new, budget, seqs)
    roof = sum(predict(step(NANO, rows, "float32", logits_rows=n), FAST, "float32").lower for rows, n in steps)
    assert bound <= roof * (1 + 1e-9)


def test_the_lower_bound_is_not_loose():
    """Mutation: without the longest answer's steps, or without the FLOPs, one of these would be far below."""
    alone = predict_serving(NANO, [32], [64], FAST, "float32", budget=64, seqs=1)
    weights = total(step(NANO, [(1, 0)], "float32")).weights
    assert alone.lower >= 64 * weights / FAST.roof_bandwidth
    many = predict_serving(NANO, [200] * 64, [2] * 64, FAST, "float32", budget=512, seqs=64)
    assert many.lower >= many.flops / FAST.peak("float32")


# The judge ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return Transformer(NANO, random_weights(NANO, std=0.2), 128)


def answers_of(model, prompts, count):
    """Greedy answers by recomputing everything: no cache, no batch."""
    out = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            batch = judge.Batch.build([judge.Row(slot=0, start=0, num_new=len(ids))], ids, model.device)
            ids.append(int(model.logits(model.forward(batch, judge.NoCacheAttention())[-1:]).argmax()))
        out.append(ids[len(prompt) :])
    return out


def test_the_judge_accepts_the_models_answers_and_no_others(model):
    rng = random.Random(1)
    work = workloads.Workload("x", [[rng.randrange(10_000) for _ in range(n)] for n in (3, 20, 11, 30, 7)], [6] * 5)
    right = answers_of(model, work.prompts, 6)
    gap, best = judge.worst(model, work, right, sample=5)
    assert (gap, best) == (0.0, 1.0)
    wrong = {
        "another request's": right[1:] + right[:1],
        "one token late": [a[1:] + a[:1] for a in right],
        "of a prompt without its first token": answers_of(model, [p[1:] for p in work.prompts], 6),
        "one wrong token": [*right[:-1], [*right[-1][:-1], (right[-1][-1] + 1) % 10_000]],
    }
    for what, answers in wrong.items():
        assert judge.worst(model, work, answers, sample=5)[0] > max(judge.GAP.values()), what


@pytest.mark.model
def test_the_gap_of_bf16_is_passed_by_the_model_in_bf16_and_by_no_neighbour(embedded_folder):
    """The same on the embedded model, in the dtype that speeds are shown in."""
    from minillm import LLM
    from minillm.models.weights import load_weights

    o = options(step="throughput", dtype="bfloat16", prompt=12, new=8, requests=4, contexts=None)
    config = ModelConfig.from_folder(embedded_folder)
    work = workloads.make("W1", o, config.vocab_size)
    llm = LLM(embedded_folder, dtype="bfloat16", max_model_len=64)
    params = [throughput.greedy(n) for n in work.new_tokens]
    answers = [r.outputs[0].token_ids for r in llm.generate(work.prompts, params, use_tqdm=False)]
    reference = Transformer(config, load_weights(embedded_folder, config, torch.float32, "cpu"), 64)
    assert judge.worst(reference, work, answers)[0] <= judge.GAP["bfloat16"] / 2
    swapped = answers[1:] + answers[:1]
    assert judge.worst(reference, work, swapped)[0] > 2 * judge.GAP["bfloat16"]


# The bench ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a tokenizer: two layers of the engine's work, hardly any arithmetic."""
    from tokenizers import Tokenizer, models

    path = tmp_path_factory.mktemp("tiny")
    tiny_hf("llama").save_pretrained(path)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def raced(folder):
    """W1 to W3 in fp32, beside transformers and a "vllm" that writes nonsense."""
    patch = pytest.MonkeyPatch()
    patch.setattr(throughput, "ceilings", lambda o: FAST)
    patch.setattr(throughput, "ceilings_after", lambda o: {})
    patch.setattr(throughput, "read_bandwidth", lambda o: lambda: 1e14)
    patch.setattr(throughput, "DECODES", 3)
    patch.setitem(peers.WORKERS, "vllm", str(FAKE))
    patch.setattr(peers.WorkerPeer, "_idle_cores", lambda self, window=0.0: 0.0)
    turns = []
    for kind in (throughput.OurSide, peers.TransformersPeer, peers.WorkerPeer):
        real = kind.run
        patch.setattr(
            kind, "run", lambda self, p, n, real=real: turns.append((self, [list(x) for x in p])) or real(self, p, n)
        )
    try:
        done = throughput.run(
            options(
                step="throughput", model=str(folder), prompt=8, new=4, requests=3, contexts=None,
                peer=f"transformers,vllm={sys.executable}",
            )
        )  # fmt: skip
    finally:
        patch.undo()
    return done, turns


def test_throughput_gives_a_record_that_fails_for_the_peer_that_writes_nonsense_and_for_nothing_else(raced):
    done, _ = raced
    faults = {f.key for f in record.verify(done)}
    assert faults
    assert all("tokens of vllm" in key for key in faults)
    passed = [c["name"] for c in done["checks"] if c["passed"]]
    for name in (
        "W1: tokens of minillm-static are",
        "W2: tokens of transformers equal",
        "W3: tokens of minillm-prefix eq",
    ):
        assert any(check.startswith(name) for check in passed), name


def test_every_side_gets_the_same_tokens_in_an_order_that_turns(raced):
    done, turns = raced
    sides = done["setup"]["sides"]
    eager = [side for side in sides["W3"] if not side.endswith("-compiled")]  # those need a C++ compiler
    assert eager == ["minillm", "minillm-prefix", "transformers", "vllm", "vllm-prefix"]
    compiled = {name: sum(side.endswith("-compiled") for side in sides[name]) for name in sides}
    assert compiled in ({"W1": 1, "W2": 1, "W3": 2}, {"W1": 0, "W2": 0, "W3": 0})
    assert "minillm-int4" not in sides["W2"]  # no quality record admits int4 beside fp32
    groups, at = [], 0
    for name in [*sides, *(n for _ in range(2) for n in sides for _ in range(throughput.TURNS[n]))]:
        groups.append(turns[at : at + len(sides[name])])
        at += len(sides[name])
    assert at == len(turns)
    assert all(len({str(prompts) for _, prompts in group}) == 1 for group in groups)
    assert len({str(group[0][1]) for group in groups}) == len(groups)  # and fresh ones every turn
    order = [[id(side) for side, _ in group] for group in groups]
    assert order[3] == order[0][::-1]  # W1 of the round before: A B C, C B A


def test_the_record_holds_rates_ratios_shares_and_both_accounts(raced):
    done, _ = raced
    new = workloads.make("W1", options(step="throughput", prompt=8, new=4, requests=3), 211).new_tokens
    assert done["derived"]["W1.vllm.tokens_per_s"]["count"] == sum(new)
    assert len(done["results"]["W2.minillm"]["samples"]) == 2 * throughput.TURNS["W2"]
    assert {
        "W1.minillm.vs.transformers", "W1.minillm.vs.vllm", "W1.minillm.vs.minillm-static",
        "W3.minillm-prefix.vs.vllm-prefix", "W3.minillm-prefix.vs.minillm", "W3.vllm-prefix.share", "W1.minillm.share",
    } <= done["derived"].keys()  # fmt: skip
    assert "W3.minillm-prefix.vs.vllm" not in done["derived"]  # a cache is compared with a cache
    for key in ("single", "batch"):
        spent = {t: done["results"][f"account.{key}.{t}"]["samples"] for t in (*throughput.account.TERMS, "total")}
        for i, whole in enumerate(spent["total"]):
            assert sum(spent[t][i] for t in throughput.account.TERMS) == pytest.approx(whole, rel=1e-6)
        assert min(spent["linears"]) > 1e-7
    assert done["setup"]["about"]["vllm"]["version"] == "1.2"
    assert str(FAKE.parent) not in str(done)
    text = throughput.show(done)
    assert "W3: 1 requests" in text
    assert "FAIL" in text


def test_a_peer_that_writes_too_few_tokens_is_not_judged_but_refused(quick, monkeypatch, folder):
    monkeypatch.setitem(peers.WORKERS, "vllm", str(FAKE))
    monkeypatch.setattr(peers.WorkerPeer, "_idle_cores", lambda self, window=0.0: 0.0)
    monkeypatch.setattr(throughput, "DECODES", 3)
    real = peers.start
    monkeypatch.setattr(peers, "start", lambda name, python, load: real(name, python, load | {"mode": "short"}))
    o = options(step="throughput", model=str(folder), prompt=8, new=4, requests=2, repeats=1, contexts=None)
    o.peer, o.workloads = f"vllm={sys.executable}", ("W1",)
    done = throughput.run(o)
    assert {f.key for f in record.verify(done)} == {"checks/every side wrote every token asked for"}
    assert done["checks"][0]["detail"] == "vllm on W1"


def test_llama_cpp_starts_once_more_without_what_the_processor_refuses(monkeypatch, tmp_path):
    asked = []

    def start(side, python, load):
        asked.append((side, load["gguf"], load["extra_buffers"]))
        if load["extra_buffers"]:
            raise MinillmError("it ended with exit code -4")
        return "engine"

    monkeypatch.setattr(peers, "start", start)
    monkeypatch.setattr(throughput.gguf_files, "in_dtype", lambda source, dtype: Path(f"{source}.{dtype}"))
    o = options(step="throughput", model="x", contexts=None)
    o.gguf = "q.gguf"
    for side, file in (("llama.cpp-q4_1", "q.gguf"), ("llama.cpp", "q.gguf.float32")):
        asked.clear()
        assert throughput._start(side, {"llama.cpp": "python"}, tmp_path, o, 64) == "engine"
        assert asked == [(side, file, True), (side, file, False)]
    o.gguf = None
    with pytest.raises(MinillmError, match="give --gguf FILE"):
        throughput._start("llama.cpp", {"llama.cpp": "python"}, tmp_path, o, 64)


def test_a_speed_of_int4_stands_on_a_quality_record(tmp_path):
    claim = {
        "step": "throughput", "results": {"W2.minillm-int4": {}, "W2.minillm": {}}, "device": {"kind": "cpu"},
        "setup": {"weights_sha256": "0" * 64, "quality": {}},
    }  # fmt: skip
    (fault,) = gate.faults_of(claim, tmp_path)
    assert fault.key == "results/W2.minillm-int4"
    assert "no speed of int4 is shown" in fault.message
    claim["results"].pop("W2.minillm-int4")
    assert gate.faults_of(claim, tmp_path) == []


def test_agreement_counts_up_to_the_first_difference():
    assert throughput.agreement([[1, 2, 3], [4]], [[1, 9, 3], [4]]) == 0.5
    assert throughput.agreement([[1, 2]], [[1, 2]]) == 1


# The scheduler --------------------------------------------------------------------------------------------------------


def test_the_scheduler_bench_measures_full_steps_beside_queues_that_stay(quick, monkeypatch):
    monkeypatch.setattr(scheduler, "RUNNING", 8)
    monkeypatch.setattr(scheduler, "BUDGET", 8 + scheduler.PROMPT)
    monkeypatch.setattr(scheduler, "WAITING", (2, 5, 40))
    done = scheduler.run(options(step="scheduler", model=None, repeats=30, contexts=None))
    assert record.verify(done) == []
    assert {"step.8x2", "step.8x40", "schedule.8x5.prefix"} <= done["results"].keys()
    assert len(done["derived"]["waiting_ratio"]["samples"]) == 30
    assert all(
        a >= b for a, b in zip(done["results"]["step.8x2"]["samples"], done["results"]["schedule.8x2"]["samples"])
    )
    assert "with 40 waiting" in scheduler.show(done)


def test_the_scheduler_bench_notices_a_step_that_is_not_full(quick, monkeypatch):
    real = scheduler.Load.arrive
    monkeypatch.setattr(scheduler, "RUNNING", 32)
    monkeypatch.setattr(scheduler, "WAITING", (2, 2, 2))
    monkeypatch.setattr(scheduler, "BUDGET", 32 + scheduler.PROMPT)
    monkeypatch.setattr(scheduler.Load, "arrive", lambda self: real(self) if not hasattr(self, "scheduled") else None)
    done = scheduler.run(options(step="scheduler", model=None, repeats=6, contexts=None))
    assert len(record.verify(done)) == 2  # steps are not full, and nobody waits any more


# nano -----------------------------------------------------------------------------------------------------------------


def test_nano_runs_cut_down_on_a_cpu(quick):
    done = nano.run(options(step="nano", model="small", requests=2, repeats=1, contexts=None))
    assert record.verify(done) == []
    work = workloads.nano(2)
    assert done["derived"]["nano.tokens_per_s"]["count"] == sum(work.new_tokens)
    assert done["predictions"]["nano"]["shape"]["prompts"] == work.prompt_tokens
    assert f"{sum(work.new_tokens):,} out" in nano.show(done)


def test_nano_notices_values_of_other_tokens(quick, monkeypatch):
    from minillm.attention.paged import PagedSDPA

    real = workloads.nano
    monkeypatch.setattr(
        workloads, "nano", lambda n: workloads.Workload("nano", [p[:40] for p in real(n).prompts], [4] * n)
    )
    monkeypatch.setattr(common, "random_weights", lambda *args: random_weights(*args, std=0.3))
    run = lambda: nano.run(options(step="nano", model="small", requests=2, repeats=1, contexts=None))
    assert record.verify(run()) == []
    write = PagedSDPA.write
    monkeypatch.setattr(PagedSDPA, "write", lambda self, i, k, v, plan: write(self, i, k, v.flip(0), plan))
    done = run()
    assert {f.key for f in record.verify(done)} == {"checks/greedy tokens are the model's"}


def test_more_requests_than_nano_has_are_refused():
    with pytest.raises(MinillmError, match="from 1 to 256"):
        workloads.nano(257)
