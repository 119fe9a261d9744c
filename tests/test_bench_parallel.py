"""`bench parallel` on tiny settings: every part predicts, measures and checks; and wrong work is noticed."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import weakref
from contextlib import ExitStack, nullcontext
from fractions import Fraction
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from test_bench import BARE, FAST, TINY

from minillm.bench import (
    bubble,
    cards,
    collectives,
    common,
    main,
    parallel,
    shards,
    split,
    split_engines,
    tensor,
    transfer,
)
from minillm.bench.bubble import Bubble
from minillm.bench.cards import Cards
from minillm.bench.collectives import Collectives
from minillm.bench.shards import Shards
from minillm.bench.split import Split
from minillm.bench.tensor import TensorParallel
from minillm.bench.transfer import KVTransfer
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.events import EventLog
from minillm.models.presets import preset
from minillm.parallel.group import run_threads
from minillm.roofline import record, stats
from minillm.roofline.comm import LINKS, Link
from minillm.roofline.cost import step, total
from minillm.roofline.quantities import predict_quantity

HERE = Link("here", 1e9, 50e-6, 5e-6)


def options(**changes):
    values = {"step": "parallel", "device": "cpu", "dtype": "float32", "repeats": 2}
    return common.Options(**(values | {"out": lambda line: None} | changes))


def of(*parts, **changes):
    """A finished record of these parts."""
    book = common.recorder(
        options(**changes), FAST, parts=parallel.names(parts), **{k: v for p in parts for k, v in p.setup.items()}
    )
    for p in parts:
        p.expect(book)
    book.seal()
    for p in parts:
        p.measure(book)
    return book.finish()


def failed(done):
    return [c["name"] for c in done["checks"] if not c["passed"]]


# What is predicted -------------------------------------------------------------------------------------------------


def test_an_all_reduce_costs_what_the_model_says():
    found = predict_quantity({"quantity": "all_reduce", "link": HERE.to_dict(), "nbytes": 3_000_000, "ranks": 3})
    assert found["expected"] == pytest.approx(50e-6 + 4 * 5e-6 + 4 / 3 * 3e-3)
    assert found["upper"] == pytest.approx(1.15 * found["expected"])


def test_a_step_on_few_cores_goes_in_waves():
    """Three ranks on two cores: two waves of a third of the work each, where one process has both cores for all."""
    shape = {"quantity": "tp_step", "step_s": 0.030, "ranks": 3, "cores": 2, "alone": 2, "link": HERE.to_dict()}
    assert predict_quantity(shape | {"collectives": []})["expected"] == pytest.approx(0.040)
    assert predict_quantity(shape | {"collectives": [], "ranks": 2})["expected"] == pytest.approx(0.030)
    cards = shape | {"collectives": [], "ranks": 4, "cores": 4, "alone": 1}
    assert predict_quantity(cards)["expected"] == pytest.approx(0.0075)
    spoken = shape | {"collectives": [["all_reduce", 61, 0], ["all_gather", 1, 0], ["broadcast", 1, 0]]}
    said = 61 * (50e-6 + 4 * 5e-6) + (50e-6 + 2 * 5e-6) + 2 * 55e-6
    assert predict_quantity(spoken)["expected"] == pytest.approx(0.040 + said)


def test_a_bubble_is_exact_on_a_virtual_clock_and_may_not_be_less():
    shape = {"quantity": "bubble", "stages": 3, "micro_batches": 4, "clock": "virtual"}
    found = predict_quantity(shape)
    assert found["expected"] == float(Fraction(2, 6))
    assert 0 < found["expected"] - found["lower"] < 1e-9
    assert predict_quantity(shape | {"clock": "sleeping"})["lower"] == 0


def test_a_split_shows_only_the_tail_of_its_transfer():
    shape = {"quantity": "split_ttft", "prefill_s": 1.0, "transfer_s": 0.5, "layers": 10, "step_s": 0.02}
    assert predict_quantity(shape)["expected"] == pytest.approx(1.0 + 0.05 + 0.02)
    slow = predict_quantity(shape | {"transfer_s": 3.0})["expected"]
    assert slow == pytest.approx(1.0 + 0.3 + 2.0 * 0.9 + 0.02)


def test_what_ranks_say_in_a_step_is_what_the_engine_says():
    smol = preset("smollm2-135m")
    assert tensor.collectives(smol, 8, 3, "float32") == [
        ["broadcast", 1, 8192], ["all_reduce", 61, 8 * 576 * 4], ["all_gather", 1, 8 * 16384 * 4],
    ]  # fmt: skip


def test_the_products_of_a_layer_are_those_of_the_cost_model():
    for name in ("llama-3.1-8b", "llama-3.1-70b", "smollm2-135m"):
        config = preset(name)
        ops = [op for op in step(config, [(1, 9)] * 32) if op.name in ("qkv", "o_proj", "gate_up", "down")]
        whole, layer = total(ops), shards.layer(config, 32, "bfloat16", 0)
        for field in ("flops", "weights", "activations_read", "activations_written"):
            assert getattr(whole, field) == config.num_layers * getattr(layer, field), field


def test_the_link_is_that_of_the_card():
    assert shards.link_of("NVIDIA H200") == ("nvlink4", LINKS["nvlink4"])
    assert shards.link_of("NVIDIA A100-SXM4-80GB")[0] == "nvlink3"
    assert shards.link_of("NVIDIA GeForce RTX 4090")[0] == "pcie4"


def test_numbers_with_collectives_are_worked_out_again():
    results = {"a": {"samples": [4.0, 8.0]}, "b": {"samples": [1.0, 3.0]}}
    entry = {"count": 2, "nbytes": 0, "ranks": 2, "link": Link("x", 1e9, 0.5).to_dict()}
    assert stats.derive(entry | {"op": "with_collectives", "of": ["b"]}, {"results": results}) == [2.0, 4.0]
    assert stats.derive(entry | {"op": "tp_speedup", "of": ["a", "b"]}, {"results": results}) == [2.0, 2.0]


# Parts, dry -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def said():
    """All-reduces between two real processes, few and small."""
    patch = pytest.MonkeyPatch()
    patch.setattr(collectives, "SIZES", (4096, 16384, 65536, 262144, 1048576))
    patch.setattr(collectives, "ROUNDS", {"gloo": 3})
    patch.setattr(collectives, "WORLDS", {"gloo": 1})
    part = Collectives(options(), ranks=(2,))
    done = of(part)
    patch.undo()
    return part, done


def test_collectives_are_fitted_on_some_sizes_and_judged_on_others(said):
    part, done = said
    assert record.verify(done) == []
    assert {n for n, _, _ in part.seen} == {4096, 65536, 1048576}
    assert set(done["predictions"]) == {
        "all_reduce.2.16384", "all_reduce.2.262144", "again.2.4096", "again.2.65536", "again.2.1048576"
    }  # fmt: skip
    assert done["setup"]["link"]["bandwidth"] > 0
    assert done["derived"]["all_reduce.error"]["of"] == ["all_reduce.2.16384", "all_reduce.2.262144"]
    assert len(done["derived"]["all_reduce.again_error"]["samples"]) == 3
    assert "on sizes the fit never saw: off by" in "\n".join(Collectives.lines(done))


class Machine:
    """In place of processes: an all-reduce takes what `link` says, and three ranks on its two cores 1 ms a message
    more. Each world is slower than the one before."""

    def __init__(self, link, right=True):
        self.link, self.right, self.made = link, right, []

    def __call__(self, size, function, arguments, backend):
        self.made.append((size, arguments["sizes"]))
        turn = 1e-3 * 2 * (size - 1) * (size > 2)
        slower = 1 + 0.01 * len(self.made)
        line = [slower * (self.link.all_reduce(n, size) + turn) for n in arguments["sizes"]]
        one = {"sizes": [line] * 2, "ring": [1e-3] * 2, "library": [1e-3] * 2}
        return [one | {"right": self.right or r == 0} for r in range(size)]


@pytest.fixture
def machine(monkeypatch):
    def start(**how):
        fake = Machine(HERE, **how)
        monkeypatch.setattr(collectives, "run_processes", fake)
        monkeypatch.setattr(collectives, "cores", lambda: 2)
        return fake

    return start


def test_a_wrong_sum_fails_the_record(machine):
    machine(right=False)
    assert failed(of(Collectives(options()))) == ["an all-reduce and the ring give the sum"]


def test_more_ranks_than_cores_have_a_link_of_their_own(machine):
    """Worlds of each number of ranks in turn; three take turns on two cores, which is no bandwidth's fault."""
    fake = machine()
    part = Collectives(options())
    known = part.sizes[::2]
    assert fake.made == [(2, known), (3, known)] * part.worlds
    assert part.link_of(2) is part.link
    assert part.link_of(3).bandwidth == part.link.bandwidth == pytest.approx(HERE.bandwidth, rel=0.1)
    assert part.link_of(3).hop == pytest.approx(1e-3 + HERE.latency(3) / 4, rel=0.1)
    done = of(part)
    assert record.verify(done) == []
    for name in ("error", "crowded_error", "again_error", "crowded_again_error"):
        assert done["derived"][f"all_reduce.{name}"]["max"] < 0.1
    assert max(stats.derive({"op": "prediction_error", "of": ["all_reduce.3.8192"]}, done)) < 0.1
    text = "\n".join(Collectives.lines(done))
    assert "of more ranks than cores: off by" in text
    assert "timed again: " in text


def test_the_slowest_rank_of_a_round_counts():
    ranks = [{"sizes": [[1, 5], [2, 2]], "ring": [1, 4]}, {"sizes": [[3, 4], [1, 9]], "ring": [2, 3]}]
    assert collectives.slowest(ranks, "sizes") == [[3, 5], [2, 9]]
    assert collectives.slowest(ranks, "ring") == [2, 4]


@pytest.fixture
def bubbles(monkeypatch):
    monkeypatch.setattr(bubble, "STAGES", (2,))
    monkeypatch.setattr(bubble, "COUNTS", (1, 3))
    monkeypatch.setattr(bubble, "ASLEEP", 2)
    threads = lambda size, _, arguments: run_threads(size, lambda group: bubble_work(group, **arguments), timeout_s=60)
    monkeypatch.setattr(bubble, "run_processes", threads)


def bubble_work(group, tables, clock):
    from minillm.parallel.pipeline import paced_many

    return paced_many(group, tables, clock)


def test_the_bubble_measured_is_the_bubble_predicted(bubbles):
    done = of(Bubble(options(), pace_s=2e-3))
    assert record.verify(done) == []
    assert done["results"]["bubble.2x3"]["median"] == pytest.approx(0.25)
    assert len(done["results"]["bubble.asleep.2x3"]["samples"]) == 2
    assert "2 stages, 3 micro-batches, virtual 0.2500, formula 0.2500" in "\n".join(Bubble.lines(done))


def test_a_run_off_its_timetable_fails_the_record(bubbles, monkeypatch):
    monkeypatch.setattr(bubble, "timetable", lambda table: [])
    assert failed(of(Bubble(options(), pace_s=1e-3))) == ["paced runs on a virtual clock keep to the timetable"]


@pytest.fixture
def small_shards(monkeypatch):
    config = TINY.replace(vocab_size=126, num_heads=12, num_kv_heads=3)
    monkeypatch.setitem(common.PRESETS, "tiny", config)
    monkeypatch.setitem(shards.STREAM_BYTES, "cpu", 1 << 16)
    return lambda **changes: Shards(options(**changes), FAST, ("tiny",), rows=(1, 4))


def test_shards_are_measured_in_turn_and_the_all_reduces_added(small_shards):
    done = of(small_shards())
    assert record.verify(done) == []
    assert set(done["predictions"]) == {f"layer.tiny.x{rows}.tp{tp}" for rows in (1, 4) for tp in (1, 3)}
    one, speedup = (done["results" if k == "tp1" else "derived"][f"layer.tiny.x4.{k}"] for k in ("tp1", "tp3.speedup"))
    shard, with_them = done["results"]["layer.tiny.x4.tp3"], done["derived"]["layer.tiny.x4.tp3.with_collectives"]
    added = 2 * LINKS["pcie4"].all_reduce(4 * 64 * 4, 3)
    assert with_them["samples"] == pytest.approx([s + added for s in shard["samples"]])
    assert speedup["samples"] == pytest.approx([a / b for a, b in zip(one["samples"], with_them["samples"])])
    assert "x4.tp3" in "\n".join(Shards.lines(done))


def test_what_a_graph_reads_lives_as_long_as_it(monkeypatch):
    """Without it, the inputs of a captured product are freed, and a replay reads what lies there by then."""

    class Graph:
        def replay(self):
            self.replays = getattr(self, "replays", 0) + 1

    made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(Graph()) or made[-1])
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda what: nullcontext())
    x = torch.ones(1)
    kept, runs = weakref.ref(x), []
    replay = shards.replayed(lambda x=x: runs.append(x.sum().item()))
    del x
    assert runs == [1.0] * 3  # twice to warm up, once while it is captured
    replay()
    assert made[0].replays == 1
    assert kept() is not None
    del replay
    gc.collect()
    assert kept() is None


def test_shards_that_are_not_the_layers_fail_the_record(small_shards, monkeypatch):
    real = torch.Tensor.chunk
    monkeypatch.setattr(
        torch.Tensor, "chunk", lambda t, n, d: tuple(reversed(real(t, n, d))) if d == 0 else real(t, n, d)
    )
    assert failed(of(small_shards())) == ["tiny: the shards' products are the layer's"]


@pytest.mark.model
def test_ranks_beside_one_process_write_the_same_tokens(embedded_folder, monkeypatch):
    """The real engine on three ranks, as small as it gets."""
    monkeypatch.setattr(tensor, "ROWS", (2,))
    monkeypatch.setattr(tensor, "PROMPT", 8)
    monkeypatch.setattr(tensor, "NEW", 4)
    before = torch.get_num_threads()
    with ExitStack() as stack:
        part = TensorParallel(options(model=str(embedded_folder), repeats=1), lambda ranks: HERE)
        stack.callback(part.close)
        assert part.size == 3
        done = of(part)
        assert record.verify(done) == []
        assert not failed(done)
        assert done["results"]["said.all_reduce.x2"]["median"] < done["results"]["decode.tp.x2"]["median"]
        assert "3 ranks beside one process" in "\n".join(TensorParallel.lines(done))
        real = part._turn
        monkeypatch.setattr(
            part, "_turn", lambda side, prompts: wrong(real(side, prompts)) if side == "many" else real(side, prompts)
        )
        assert failed(of(part)) == [
            "tokens of 3 ranks are those of one engine", "two all-reduces a layer and one for the embedding",
        ]  # fmt: skip
    assert torch.get_num_threads() == before


def wrong(found):
    step_s, answers, said, steps = found
    said.calls["all_reduce"] -= 1
    return step_s, [[*a[:-1], 0] for a in answers], said, steps


SMALL = ModelConfig(
    vocab_size=1536, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position_embeddings=256,
)  # fmt: skip


def test_several_cards_are_rehearsed_with_processes_on_a_cpu(monkeypatch):
    part = Cards(options(repeats=2), HERE, FAST, SMALL, (2,))
    part.context = 40
    done = of(part)
    assert record.verify(done) == []
    assert not failed(done)
    assert {"cards.tp2.x1", "cards.one.tp2.x8", "cards.said.tp2.x8"} <= done["results"].keys()
    assert "2 cards, 8 rows" in "\n".join(Cards.lines(done))


@pytest.mark.parametrize("size", [2, 4])
def test_the_logits_of_ranks_are_those_of_one_and_a_wrong_share_is_seen(size, monkeypatch):
    from minillm.parallel.shard import Place

    def error():
        work = lambda group: cards._error(group, Place(group.rank, size), SMALL, torch.float32, "cpu", 0)
        return max(run_threads(size, work))

    assert error() < cards.TOLERANCE["float32"]
    real = cards.local_tensors
    swapped = lambda config, place, shapes: real(config, Place(place.tp - 1 - place.tp_rank, place.tp), shapes)
    monkeypatch.setattr(cards, "local_tensors", swapped)  # the head's parts lie in another order
    assert error() > 10 * cards.TOLERANCE["float32"]


def test_a_transfer_is_predicted_from_its_stages_as_a_pipeline_of_two():
    shape = {"quantity": "moved", "nbytes": 100, "pieces": 10, "sender": [100, 50], "receiver": [200]}
    found = predict_quantity(shape)
    assert found["expected"] == pytest.approx(3.0 + 0.05)
    assert found["upper"] == pytest.approx(3.5)


@pytest.fixture(scope="module")
def transfer_part():
    part = KVTransfer(options(), SMALL, (5, 33))
    yield part
    part.close()
    assert part.process.poll() is not None


def test_kv_arrives_in_another_process(transfer_part, monkeypatch):
    done = of(transfer_part)
    assert record.verify(done) == []
    assert not failed(done)
    assert done["setup"]["kv_bytes_per_token"] == 2 * 3 * 2 * 16 * 4
    assert len(done["results"]["transfer.33"]["samples"]) == 2
    assert "33 tokens" in "\n".join(KVTransfer.lines(done))


def test_kv_that_arrives_wrong_fails_the_record(transfer_part, monkeypatch):
    monkeypatch.setattr(transfer, "checksum", lambda tensors: 1)  # here, not in the other process
    real = transfer_part.pool.read
    monkeypatch.setattr(
        transfer_part.pool, "read", lambda layer, tokens: [t + torch.rand(1) for t in real(layer, tokens)]
    )
    assert failed(of(transfer_part)) == ["the other pool holds the same KV, to the bit", "every piece had its checksum"]


@pytest.fixture(scope="module")
def split_part():
    patch = pytest.MonkeyPatch()
    patch.setattr(split, "STREAMS", {"cpu": 2})
    patch.setattr(split, "LONG", 4000)  # they run as long as the prompt takes, also where its process stands still
    rates = dict.fromkeys(("read", "crc32", "copy", "write"), 1e9)
    part = Split(options(repeats=1), SMALL.replace(max_position_embeddings=4096), rates, prompt=40)
    yield part
    part.close()
    patch.undo()
    assert part.process.poll() == 0


def test_a_split_of_random_weights_writes_what_one_engine_writes(split_part):
    done = of(split_part)
    assert record.verify(done) == []
    assert not failed(done)
    assert {"ttft.split", "ttft.together", "gap.split", "split.transfer"} <= done["results"].keys()
    assert done["setup"]["split_warm"]["prefill_s"] > 0
    assert "prefill and decode in two processes" in "\n".join(Split.lines(done))


def test_a_split_that_computes_everything_itself_fails_the_record(split_part, monkeypatch):
    """A fall back to recompute gives the right tokens, and its times would say nothing of a split."""
    monkeypatch.setattr(split_part.remote, "take", lambda request: False)
    assert failed(of(split_part)) == ["every prompt of the split came with its KV"]


def test_answers_that_differ_fail_the_record(split_part, monkeypatch):
    book = common.recorder(options(), FAST)
    prompts = [[1, 2], [3, 4]]
    split_part._check(book, prompts, {"together": [[5], [6]], "split": [[5], [7]]}, True)
    assert failed(book.record) == [
        "every prompt of the split came with its KV", "tokens of the split are those of one engine",
    ]  # fmt: skip
    monkeypatch.setattr(tensor, "dtype_name", lambda dtype: "bfloat16")  # judged by the model: these are no best tokens
    book = common.recorder(options(), FAST)
    answers = [[7] * split.NEW, [8] * split.NEW]
    split_part._check(book, prompts, {"together": answers, "split": answers}, True)
    assert "tokens of the split are the model's" in failed(book.record)


def test_the_longest_wait_is_that_while_the_prompt_is_under_way():
    """Gaps before it came and after its first token are not its doing."""

    class Llm:
        def __init__(self):
            self.gaps = {"other": [0.001] * 4 + [0.030] + [0.001] * 5000, "prompt": [0.1, 0.05]}

        async def generate(self, prompt, params):
            tokens = []
            for gap in self.gaps["prompt" if prompt["prompt_token_ids"] == [9] else "other"]:
                await asyncio.sleep(gap)
                tokens.append(1)
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(tokens))])

    worst, tokens, ran = asyncio.run(split.interrupted(Llm(), [[1]], 5004, [9], 2))
    assert worst >= 0.030
    assert (tokens, ran) == ([1, 1], True)
    short = Llm()
    short.gaps["other"] = [0.001]
    with pytest.raises(MinillmError, match="ended before the prompt came"):
        asyncio.run(split.interrupted(short, [[1]], 1, [9], 2))


def test_the_model_of_a_card_is_one_of_which_two_fit():
    assert parallel.model_of(141e9) == parallel.model_of(80e9) == "llama-3.1-8b"
    assert parallel.model_of(24e9) == "llama-3.2-1b"
    assert parallel.model_of(16e9) == "qwen3-0.6b"


# The whole --------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_machine_make_one_record(bubbles, small_shards, monkeypatch):
    monkeypatch.setattr(parallel, "ceilings", lambda options: FAST)
    monkeypatch.setattr(parallel, "ceilings_after", lambda options: {})
    monkeypatch.setattr(parallel, "on_cpu", lambda options, stack: [Bubble(options, 1e-3), small_shards()])
    done = parallel.run(options())
    assert record.verify(done) == []
    assert done["setup"]["parts"] == ["Bubble", "Shards"]
    text = parallel.show(done)
    assert "bubble of paced runs" in text
    assert "check  ok    tiny: the shards' products are the layer's" in text


@pytest.mark.parametrize(("count", "names"), [(1, []), (2, ["Collectives", "Cards"]), (8, ["Collectives", "Cards"])])
def test_what_a_machine_with_gpus_measures(monkeypatch, count, names):
    made = []
    for name in ("Collectives", "Cards", "Shards", "KVTransfer", "Split"):
        how = {
            "__init__": lambda self, *a, **how: made.append((a, how)),
            "link": HERE,
            "rates": {},
            "close": lambda self: None,
        }
        kind = type(name, (), how)
        monkeypatch.setattr(parallel, name, kind)
    monkeypatch.setattr(parallel, "_find_kernels", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    parts = parallel.names(parallel.on_cuda(options(model="llama-3.1-8b"), FAST, ExitStack()))
    assert parts[:3] == ["Shards", "KVTransfer", "Split"]
    assert [n for n in parts if n in ("Collectives", "Cards")] == names


def test_every_part_can_be_shown():
    for part in parallel.SHOWN.values():
        assert callable(part.lines)


def test_on_a_cpu_the_step_computes_in_fp32_unless_asked(monkeypatch):
    seen = []

    def run(options):
        seen.append(options.dtype)
        raise MinillmError("enough")

    monkeypatch.setattr(parallel, "run", run)
    assert main.main(["parallel", "--device", "cpu"]) != 0
    assert main.main(["parallel", "--device", "cpu", "--dtype", "bfloat16"]) != 0
    assert seen == ["float32", "bfloat16"]


def test_the_command_knows_the_step(capsys):
    assert main.main(["parallel", "--device", "cpu", "--prompt", "5"]) != 0
    assert "--prompt belongs to" in capsys.readouterr().err
    assert main.command_line("parallel", {"repeats": 3}) == "python3 -m minillm.bench parallel --repeats 3"


IMPORTS = """
    import asyncio
    from dataclasses import asdict
    import minillm.bench.parallel, minillm.cluster.prefill_worker, minillm.cluster.shared_memory
    from minillm.bench import split_engines, transfer
    from minillm.config import ModelConfig
    config = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=16, max_position_embeddings=64)
    how = {"dtype": "float32", "device": "cpu", "max_num_seqs": 2, "max_model_len": 64}
    llm = split_engines.make({"config": asdict(config), "seed": 0}, how)
    first, step, tokens = asyncio.run(split_engines.alone(llm, [1, 2, 3], 4))
    llm.shutdown()
    assert len(tokens) == 4, tokens
    heavy = {m for m in ("tqdm", "gguf", "tokenizers", "safetensors", "fastapi", "uvicorn") if m in sys.modules}
    sys.exit(f"imported {heavy}" if heavy else 0)
"""


@pytest.mark.parametrize("reads", [[1, 1, 1, 1, 1], [3, 2], [5]])
def test_a_step_lasts_as_long_as_the_engine_says_however_busy_the_reader(reads):
    """A prompt of two steps, and five tokens two seconds apart, of which the reader gets several at once."""
    log = EventLog(clock=iter([0, 7, 9, 11, 13, 15, 16]).__next__)

    async def generate(prompt, params):
        for rows in [[("r", 512, 512)], [("r", 8, 520)], *[[("r", 1, 521)]] * 4, []]:
            log.record("step", rows=rows)
        for end in accumulate(reads):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(range(end)))])

    llm = SimpleNamespace(generate=generate, engine=SimpleNamespace(events=log))
    _, step, tokens = asyncio.run(split_engines.alone(llm, [1], 5))
    assert step == 2
    assert tokens == [0, 1, 2, 3, 4]


def test_a_bare_machine_can_import_it_and_runs_an_engine_of_random_weights():
    code = textwrap.dedent(BARE[: BARE.index("    from minillm.config")]) + textwrap.dedent(IMPORTS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
