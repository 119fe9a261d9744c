"""Quality before speed: the report, its arithmetic, and every way in which a speed must not be shown."""

import json
import math

import pytest
import torch
from test_bench import FAST, options
from test_bench import TINY as OTHER

from minillm.bench import main, quality, quant
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models.transformer import Transformer
from minillm.models.weights import random_weights
from minillm.quant import LINEARS, quantize_int4, quantize_model
from minillm.roofline import cost, evidence, gate, quantities, record
from minillm.roofline.predict import predict_step

TINY = ModelConfig(**(vars(OTHER) | {"intermediate_size": 128}))  # groups of 64 fit
TEXT = [(7 * i * i + 3 * i) % TINY.vocab_size for i in range(60)]


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A model small enough to judge in a second; records lie in tmp_path."""
    source = quality.Source(TINY, lambda: random_weights(TINY, std=0.15), "cpu")
    sha = quality.fingerprint(source.load())
    for module in (quality, quant):
        monkeypatch.setattr(module, "source_of", lambda o: (source, sha))
    monkeypatch.setattr(quality, "this_machine", lambda device: FAST)
    monkeypatch.setattr(quality, "tokens_of", lambda o: TEXT)
    monkeypatch.setattr(quant, "ceilings", lambda o: FAST)
    monkeypatch.setattr(quant, "ceilings_after", lambda o: {"read": 1e15})
    monkeypatch.setattr(quant, "CONTEXT", 40)
    for name, value in {"WINDOW": 32, "STRIDE": 16, "PROMPT": 8, "NEW": 6, "PROMPTS": 4}.items():
        monkeypatch.setattr(quality, name, value)
    monkeypatch.setattr(quantities, "GATES", {8: 2.0, 4: 2.0})
    monkeypatch.setattr(gate, "GATES", quantities.GATES)
    monkeypatch.setenv("MINILLM_RECORDS", str(tmp_path))
    return tmp_path


def judge(tiny):
    done = quality.run(options(step="quality", contexts=None))
    record.save(done, tiny)
    return done


def time_it():
    return quant.run(options(step="quant", contexts=None, repeats=3))


def resigned(done, edit):
    done = json.loads(json.dumps(done))
    edit(done)
    done["hash"] = record.content_hash(done)
    return done


# The report -----------------------------------------------------------------------------------------------------------


def test_the_report_verifies_and_says_what_passed(tiny):
    done = judge(tiny)
    assert record.verify(done) == []
    assert done["predicted_at"] <= done["measured_at"]
    for v in quality.VARIANTS:
        size, error, _ = (f"{quantity}.{v.name}" for quantity in v.judged)
        assert done["results"][size]["median"] == done["predictions"][size]["prediction"]["expected"]
        predicted = done["predictions"][error]["prediction"]["expected"]
        assert 0.8 < done["results"][error]["median"] / predicted < 1.2  # weights, keys and values are about normal
    text = quality.show(done)
    assert text.count("passes") == len(quality.VARIANTS)
    coarse, fine = (done["results"][f"kl.{name}"]["median"] for name in ("int4", "int8"))
    assert coarse > 10 * fine > 0


def test_the_numbers_are_those_of_the_definition(tiny):
    """Perplexity, KL, agreement of one variant once more, with the plain formulas and no windows in common code."""
    done = judge(tiny)
    plain = Transformer(TINY, random_weights(TINY, std=0.15))
    coded = quantize_model(Transformer(TINY, random_weights(TINY, std=0.15)), "int4")
    loss, n = {"float32": 0.0, "int4": 0.0}, 0
    for begin, first in ((0, 1), (16, 32), (32, 48)):
        p, q = (quality.EngineSide(m).logits(TEXT[begin : begin + 32]).double() for m in (plain, coded))
        for i in range(first - begin - 1, min(31, 59 - begin)):
            answer = TEXT[begin + i + 1]
            n += 1
            for name, x in (("float32", p), ("int4", q)):
                loss[name] -= float(x[i].log_softmax(-1)[answer])
    assert n == len(TEXT) - 1
    for name in loss:
        assert math.isclose(done["results"][f"perplexity.{name}"]["median"], math.exp(loss[name] / n), rel_tol=1e-5)
    ratio = math.exp((loss["int4"] - loss["float32"]) / n)
    assert math.isclose(done["derived"]["perplexity_ratio.int4"]["median"], ratio, rel_tol=1e-5)


@pytest.mark.parametrize("count", [2, 31, 32, 33, 48, 60, 100])
def test_windows_judge_each_token_once_with_enough_before_it(count):
    seen = []
    for begin, end, first in quality.windows(count, 32, 16):
        assert 0 <= begin < first < end <= count
        assert end - begin <= 32
        seen += range(first, end)
        assert begin == 0 or first - begin >= 16
    assert seen == list(range(1, count))


def test_a_side_writes_what_its_logits_say():
    side = quality.EngineSide(Transformer(TINY, random_weights(TINY, std=0.15)))
    written = side.generate(TEXT[:8], 6)
    for i, token in enumerate(written):
        assert int(side.logits(TEXT[:8] + written[:i])[-1].argmax()) == token


def test_a_wrong_quantiser_fails_the_report(tiny, monkeypatch):
    """Codes of the wrong group: the bytes are right, and the check of half a step is not."""
    from minillm import quant as quant_module

    def shifted(weight, group=32):
        packed, scale, zero = quantize_int4(weight, group)
        return packed.roll(1, 1), scale, zero

    monkeypatch.setattr(quant_module, "quantize_int4", shifted)
    done = judge(tiny)
    failed = {f.key for f in record.verify(done)}
    assert "checks/int4: every weight is within half a step" in failed
    assert "checks/int8: every weight is within half a step" not in failed


def test_fewer_bytes_than_the_scheme_has_are_a_fault(tiny, monkeypatch):
    monkeypatch.setattr(quality, "weights_against", lambda model, plain: (100, 0.01, 0.5))
    assert "results/weight_bytes.int8/p10" in {f.key for f in record.verify(judge(tiny))}


def test_a_quantity_is_predicted_before_the_seal_and_worked_out_again(tiny):
    done = judge(tiny)
    forged = resigned(done, lambda r: r["predictions"]["weight_bytes.int8"]["prediction"].update(lower=1))
    forged["prediction_hash"] = record.prediction_hash(forged)
    forged["hash"] = record.content_hash(forged)
    assert "predictions/weight_bytes.int8/lower" in {f.key for f in record.verify(forged)}
    book = record.Recorder("quality", FAST, command="x", setup={})
    book.seal()
    with pytest.raises(MinillmError, match="sealed"):
        book.expect("weight_bytes.int8", "weight_bytes", model={}, scheme="int8")
    with pytest.raises(MinillmError, match="cannot be predicted"):
        quantities.predict_quantity({"quantity": "beauty"})


def test_predicted_bytes_are_those_of_the_roofline_and_of_the_model():
    for scheme in ("int8", "int4"):
        ops = cost.step(TINY, [(1, 10)], "float32", weights_as=scheme)
        counted = sum(op.weights for op in ops if op.kind == "quantized")
        shape = {"quantity": "weight_bytes", "model": vars(TINY), "dtype": "float32", "scheme": scheme}
        model = quantize_model(Transformer(TINY, random_weights(TINY)), scheme)
        held = sum(getattr(layer, name).nbytes for layer in model.layers for name in LINEARS)
        assert counted == held == quantities.predict_quantity(shape)["expected"]
    plain, coded = (cost.step(TINY, [(1, 10)], "float32", weights_as=w) for w in (None, "int8"))
    assert cost.total(plain).flops == cost.total(coded).flops
    assert [a for a in plain if a.kind != "linear"] == [b for b in coded if b.kind not in ("linear", "quantized")]
    assert next(op for op in coded if op.name == "lm_head") == next(op for op in plain if op.name == "lm_head")
    fast, slow = (predict_step(TINY, [(1, 10)], FAST, "float32", weights_as=w) for w in ("int8", None))
    assert fast.lower < slow.lower


# The cache ------------------------------------------------------------------------------------------------------------


def test_a_quantised_cache_is_judged_like_weights(tiny):
    """Bytes of a token as allocated; both formats change the answers; the gate is that of eight bits."""
    done = judge(tiny)
    c = TINY
    plain = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 4
    eight = 2 * c.num_layers * c.num_kv_heads * (c.head_dim + 4)
    assert done["results"]["kv_bytes.float32"]["median"] == plain
    for name in ("kv-int8", "kv-fp8"):
        assert done["results"][f"kv_bytes.{name}"]["median"] == eight
        assert done["predictions"][f"perplexity_ratio.{name}"]["prediction"]["upper"] == quantities.GATES[8]
        assert f"weight_bytes.{name}" not in done["results"]
        assert done["results"][f"kl.{name}"]["median"] > 1e-9  # it is another cache, and not the plain one again
    assert done["results"]["kv_error.kv-fp8"]["median"] > 3 * done["results"]["kv_error.kv-int8"]["median"]
    assert f"kv-int8   {eight / 1e3:>7.2f} kB/t" in quality.show(done)


def test_the_cache_that_is_judged_is_the_engines():
    """A plain pool gives the plain logits, a quantised one others, and decoding agrees with reading at once."""
    model = Transformer(TINY, random_weights(TINY, std=0.15))
    plain = quality.EngineSide(model)
    for kv, close in (("auto", True), ("int8", False), ("fp8", False)):
        side = quality.PagedSide(model, kv, 64)
        assert torch.allclose(side.logits(TEXT[:40]), plain.logits(TEXT[:40]), atol=1e-5) == close, kv
        written = side.generate(TEXT[:8], 6)
        for i, token in enumerate(written):
            assert int(side.logits(TEXT[:8] + written[:i])[-1].argmax()) == token


@pytest.mark.parametrize("scales", ["one for all heads", "too small"])
def test_a_wrong_scale_of_the_cache_fails_the_report(tiny, monkeypatch, scales):
    from minillm.cache import pool

    def wrong(x, dtype):
        stored, scale = pool.quantize_kv(x, dtype)
        return stored, scale.mean(-1, keepdim=True).expand_as(scale) if scales[0] == "o" else scale * 0.98

    monkeypatch.setattr(quality, "quantize_kv", wrong)
    failed = {f.key for f in record.verify(judge(tiny))}
    assert "checks/kv-int8: every entry is within half a step" in failed
    assert "checks/int8: every weight is within half a step" not in failed


def test_a_wrong_paged_cache_fails_the_report(tiny, monkeypatch):
    from minillm.attention.paged import PagedSDPA

    def one_late(self, layer, k, v, plan):
        write(self, layer, k.roll(1, 0), v, plan)
        self._new = k, v  # it is the pool that is wrong, and not what is at hand

    write = PagedSDPA.write
    monkeypatch.setattr(PagedSDPA, "write", one_late)
    assert "checks/a paged cache that is not quantised changes nothing" in {f.key for f in record.verify(judge(tiny))}


def test_predicted_errors_of_a_cache_hold_for_normal_values():
    from minillm.cache.pool import KV_DTYPES, dequantize_kv, quantize_kv

    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    shape = {"quantity": "kv_error", "model": vars(TINY) | {"head_dim": 64}, "dtype": "float32"}
    for kv, dtype in KV_DTYPES.items():
        error = (dequantize_kv(*quantize_kv(x, dtype)) - x).norm() / x.norm()
        predicted = quantities.predict_quantity(shape | {"kv": kv})
        assert 0.95 < float(error) / predicted["expected"] < 1.05
        alone = torch.zeros(64, 64) + torch.eye(64) * 1000 + 3.9 * (1 - torch.eye(64))  # nearly all energy in one entry
        assert (dequantize_kv(*quantize_kv(alone, dtype)) - alone).norm() / alone.norm() < predicted["upper"]
    with pytest.raises(MinillmError, match="cannot be predicted"):
        quantities.predict_quantity(shape | {"kv": "int2"})


# The gate -------------------------------------------------------------------------------------------------------------


def test_with_a_report_the_speed_is_shown(tiny):
    judge(tiny)
    done = time_it()
    assert record.verify(done) == []
    assert {"decode.float32", "decode.int8", "decode.int4"} == set(done["predictions"])
    assert len(done["derived"]["speedup.int8"]["samples"]) == 3
    assert "times as fast" in quant.show(done)
    record.save(done, tiny)
    assert evidence.check(tiny) == []


def test_a_speed_without_a_report_is_refused(tiny):
    with pytest.raises(MinillmError, match="no speed of int8 is shown: no record 'quality-cpu'.*bench quality"):
        time_it()
    done = judge(tiny)
    timed = time_it()
    record.save(timed, tiny)
    (tiny / f"{done['name']}.json").unlink()
    with pytest.raises(MinillmError, match="no speed of int8 is shown"):
        quant.show(timed)
    assert {"results/decode.int8", "results/decode.int4"} <= {f["key"] for f in evidence.check(tiny)}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda r: r["derived"]["perplexity_ratio.int8"].update(median=1.0), "does not verify"),
        (lambda r: r["results"]["perplexity.int8"].update(samples=[1.0]), "does not verify"),
        (lambda r: r["setup"].update(weights_sha256="0" * 64), "is of other weights"),
        (lambda r: r["setup"].update(rounding=0), "is of rounding 0"),
        (lambda r: r["checks"][0].update(passed=False), "does not verify"),
        (lambda r: [r[g].pop("perplexity_ratio.int8") for g in ("derived", "predictions")], "does not (verify|judge)"),
    ],
)  # fmt: skip
def test_a_tampered_or_foreign_report_is_refused_even_with_a_new_hash(tiny, edit, words):
    forged = resigned(judge(tiny), edit)
    record.save(forged, tiny)
    with pytest.raises(MinillmError, match=words):
        gate.admit("int8", quality.fingerprint(random_weights(TINY, std=0.15)), "cpu", tiny)


def test_a_report_edited_without_a_new_hash_is_refused(tiny):
    path = record.save(judge(tiny), tiny)
    path.write_text(path.read_text().replace('"rounding": 1', '"rounding": 2'))
    with pytest.raises(MinillmError, match="hash does not match"):
        time_it()


def test_a_variant_over_its_gate_is_not_timed_and_the_record_says_so(tiny, monkeypatch):
    done = judge(tiny)
    assert done["derived"]["perplexity_ratio.int4"]["median"] > done["derived"]["perplexity_ratio.int8"]["median"]
    between = max(1.0, done["derived"]["perplexity_ratio.int8"]["median"])
    monkeypatch.setitem(quantities.GATES, 4, (between + done["derived"]["perplexity_ratio.int4"]["median"]) / 2)
    judge(tiny)  # sealed with that gate
    timed = time_it()
    assert "decode.int4" not in timed["results"]
    assert "perplexity is" in timed["setup"]["refused"]["int4"]
    assert "and the gate is" in quant.show(timed)
    assert "int4: " not in quant.show(timed).replace("no speed of int4 is shown: ", "")


def test_when_every_variant_fails_nothing_is_timed(tiny, monkeypatch):
    for bits in (8, 4):
        monkeypatch.setitem(quantities.GATES, bits, 0.5)
    judge(tiny)
    monkeypatch.setattr(quant, "clock", lambda *args: pytest.fail("timed"))
    with pytest.raises(MinillmError, match="the gate is 0.5"):
        time_it()


def test_a_new_report_makes_the_old_speed_invalid(tiny, monkeypatch):
    judge(tiny)
    timed = time_it()
    monkeypatch.setattr(quality, "NEW", 5)
    judge(tiny)
    with pytest.raises(MinillmError, match="measure again"):
        quant.show(timed)


def test_a_wrong_step_fails_its_check(tiny, monkeypatch):
    from minillm.cache.contiguous import ContiguousKVCache

    judge(tiny)
    monkeypatch.setattr(ContiguousKVCache, "write", lambda *args: None)
    assert "checks/int8: a step gives the logits of the whole" in {f.key for f in record.verify(time_it())}


# The command ----------------------------------------------------------------------------------------------------------


def test_the_commands(tiny, capsys):
    common = ["--device", "cpu", "--dtype", "float32", "--out", str(tiny)]
    assert main.main(["quant", *common]) == 2
    assert "no speed of int8 is shown" in capsys.readouterr().err
    assert main.main(["quality", *common]) == 0
    assert "passes" in capsys.readouterr().out
    assert main.main(["quant", "--repeats", "2", *common]) == 0
    assert "times as fast" in capsys.readouterr().out
    assert evidence.names(tiny) == ["quality-cpu", "quant-cpu"]
    assert main.main(["quality", "--repeats", "2", *common]) == 2
    assert main.main(["quant", "--peer", "transformers", *common]) == 2


@pytest.mark.model
def test_the_committed_report_is_of_the_shipped_text_and_the_embedded_model(embedded_folder):
    """The text and the weights that are here are those that were judged."""
    import hashlib

    done = evidence.load("quality-cpu")
    assert done["setup"]["text_sha256"] == hashlib.sha256(quality.TEXT.read_bytes()).hexdigest()
    source, sha = quality.source_of(quality.Options("quality", device="cpu", dtype=done["setup"]["dtype"]))
    assert done["setup"]["weights_sha256"] == sha
    assert len(quality.tokens_of(quality.Options("quality", device="cpu"))) == done["setup"]["tokens"]
    assert torch.isfinite(source.load().embed).all()


def test_a_variant_whose_groups_do_not_fit_the_model_is_left_out():
    assert [v.name for v in quality.fitting(OTHER)] == ["int8", "int8+head", "int4", "int4+head", "kv-int8", "kv-fp8"]
    assert quality.fitting(TINY) == list(quality.VARIANTS)


def test_weights_that_were_coarse_before_are_named(tiny, monkeypatch):
    """A checkpoint that was int4 once loses nothing to int4: the report passes, and says why."""
    from minillm.quant import dequantize_int4

    assert "note:" not in quality.show(judge(tiny))

    def coarse():
        weights = random_weights(TINY, std=0.15)
        for layer in weights.layers:
            for name in LINEARS:
                setattr(layer, name, dequantize_int4(*quantize_int4(getattr(layer, name))))
        return weights

    source = quality.Source(TINY, coarse, "cpu")
    monkeypatch.setattr(quality, "source_of", lambda o: (source, quality.fingerprint(coarse())))
    text = quality.show(judge(tiny))
    assert "note: int4 hardly changes the weights" in text
    assert "note: int8" not in text
