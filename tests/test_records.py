"""Records: the order that a recorder enforces, and every way to tamper that `verify` must catch."""

import copy
import json

import pytest

from minillm.errors import MinillmError
from minillm.models.presets import preset
from minillm.roofline import evidence, fit, predict, record
from minillm.roofline.device import Device, device
from minillm.roofline.record import Recorder, content_hash, prediction_hash, save, verify

SMOL = preset("smollm2-135m")
HERE = Device(
    name="two cores", kind="cpu", peak_flops={"bfloat16": 400e9}, read_bandwidth=35e9, copy_bandwidth=30e9,
    triad_bandwidth=32e9, gather_bandwidth=25e9, memory_bytes=1 << 34, call_overhead=2e-6, source="measured",
    identity={"cpu": "two cores"}, gemm={"bfloat16": {1: 15e9, 8: 100e9, 512: 390e9}},
)  # fmt: skip


def make(where=HERE, step="ladder"):
    """A sound record: two predicted steps, a ratio, a share, a fit."""
    book = Recorder(step, where, command="python3 -m minillm.bench ladder", setup={"dtype": "bfloat16", "threads": 2})
    work = {f"decode_{c}x{b}": [(1, c)] * b for c in (64, 256) for b in (1, 2, 8, 32)} | {"prefill": [(128, 0)]}
    expected = {key: book.predict(key, SMOL, "bfloat16", rows=rows).expected for key, rows in work.items()}
    book.seal()
    for key, value in expected.items():
        book.measured(key, [1.2 * value, 1.1 * value, 1.3 * value])
    book.derive("ratio", "ratio", ["prefill", "decode_64x1"])
    book.derive("prefill.tokens_per_s", "rate", ["prefill"], count=128)
    book.derive("decode_64x1.share", "share", ["decode_64x1"])
    book.derive("fit_error", "fit_error", list(work)[1::2], train=list(work)[::2])
    book.check("logits", True, "equal")
    return book.finish({"read": 34e9})


@pytest.fixture
def sound():
    return make()


def resign(edited):
    """What a careful forger does: make every hash fit the edited content again."""
    edited["prediction_hash"] = prediction_hash(edited)
    edited["hash"] = content_hash(edited)
    return edited


def test_a_sound_record_has_no_fault_also_after_json(sound, tmp_path):
    assert verify(sound) == []
    path = save(sound, tmp_path)
    assert path.name == "ladder-cpu.json"
    assert verify(json.loads(path.read_text())) == []
    assert evidence.check(tmp_path) == []


def test_predictions_come_before_measurements():
    book = Recorder("x", HERE, command="c", setup={})
    book.predict("a", SMOL, "bfloat16", rows=[(1, 8)])
    with pytest.raises(MinillmError, match="seal"):
        book.measured("a", [1.0])
    with pytest.raises(MinillmError, match="sealed"):
        book.finish()
    seal = book.seal()
    assert book.seal() == seal
    with pytest.raises(MinillmError, match="sealed"):
        book.predict("b", SMOL, "bfloat16", rows=[(1, 8)])
    assert verify(book.finish())[0].key == "results/a"  # predicted and never measured


EDITS = {
    "a sample": (lambda r: r["results"]["prefill"]["samples"].__setitem__(0, 9.0), "hash"),
    "a version": (lambda r: r["software"].__setitem__("torch", "9.9"), "hash"),
    "a bandwidth": (lambda r: r["ceilings"].__setitem__("read_bandwidth", 99e9), "prediction_hash"),
    "a key": (lambda r: r.pop("checks"), "checks"),
    "the schema": (lambda r: r.__setitem__("schema", 0), "schema"),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edited_record_is_caught(sound, what):
    edit, key = EDITS[what]
    edit(sound)
    assert key in {f.key for f in verify(sound)}


def set_in(path, value):
    def edit(r):
        *way, last = path.split("|")
        for part in way:
            r = r[int(part)] if isinstance(r, list) else r[part]
        r[int(last) if isinstance(r, list) else last] = value

    return edit


FORGERIES = {
    "a prediction": (set_in("predictions|prefill|prediction|expected", 0.1), "predictions/prefill/expected"),
    "a term": (set_in("predictions|prefill|prediction|terms|3|seconds", 0.1), "predictions/prefill/terms/3/seconds"),
    "a bound": (set_in("predictions|prefill|prediction|bound", "memory"), "predictions/prefill/bound"),
    "a shape": (set_in("predictions|prefill|shape|rows", [[64, 0]]), "predictions/prefill/lower"),
    "a bandwidth": (set_in("ceilings|read_bandwidth", 34e9), "predictions/decode_256x1/lower"),
    "a median": (set_in("results|prefill|median", 0.01), "results/prefill/median"),
    "a spread": (set_in("results|prefill|p90", 0.01), "results/prefill/p90"),
    "a ratio": (set_in("derived|ratio|samples", [9.0, 9.0, 9.0]), "derived/ratio/samples"),
    "a rate": (set_in("derived|prefill.tokens_per_s|count", 500), "derived/prefill.tokens_per_s/samples"),
    "a fit": (set_in("derived|fit_error|samples", [0.01] * 4), "derived/fit_error/samples"),
    "a factor": (set_in("derived|fit_error|factors|linear", 1.0), "derived/fit_error/factors"),
    "what a fit saw": (set_in("derived|fit_error|of", ["prefill"]), "derived/fit_error/samples"),
    "the formula": (set_in("formula", "0"), "formula"),
    "the order": (set_in("measured_at", "2000-01-01T00:00:00.000+00:00"), "predicted_at"),
    "a failed check": (set_in("checks|0|passed", False), "checks/logits"),
    "no check": (set_in("checks", []), "checks"),
    "no samples": (set_in("results|prefill|samples", []), "results/prefill/samples"),
    "time backwards": (set_in("results|prefill|samples", [-1.0, 1.0, 1.0]), "results/prefill/samples"),
    "no shape": (set_in("predictions|prefill|shape", None), ""),
    "no device": (set_in("ceilings", {"name": "x"}), ""),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forger_who_renews_the_hashes_is_caught(sound, what):
    edit, key = FORGERIES[what]
    edit(sound)
    keys = {f.key for f in verify(resign(sound))}
    assert key in keys
    assert not keys & {"hash", "prediction_hash"}  # it is not the hash that gives it away


@pytest.mark.parametrize("junk", [None, [], 3, {}, {"schema": 1}])
def test_junk_is_a_fault_and_no_traceback(junk):
    assert verify(junk)


def test_a_result_above_its_roof_is_an_error():
    book = Recorder("x", HERE, command="c", setup={})
    floor = book.predict("step", SMOL, "bfloat16", rows=[(1, 64)]).lower
    book.seal()
    book.measured("step", [0.9 * floor] * 5)
    book.check("ran", True, "")
    unfinished = copy.deepcopy(book)
    assert [f.key for f in verify(book.finish())] == ["results/step/p10"]
    # Unless the machine had become faster meanwhile, which is measured too.
    assert verify(unfinished.finish({"read": 40e9})) == []


def test_the_roof_is_the_lower_bound_and_nothing_looser(sound, monkeypatch):
    """Mutation: comparing with half of the roof lets an impossible time through."""
    fast = resign(copy.deepcopy(sound))
    floor = fast["predictions"]["prefill"]["prediction"]["lower"]
    fast["results"]["prefill"] |= {"samples": [0.8 * floor] * 3} | dict.fromkeys(
        ("median", "p10", "p90", "min", "max"), 0.8 * floor
    )
    assert "results/prefill/p10" in {f.key for f in verify(resign(fast))}
    monkeypatch.setattr(record, "roof_seconds", lambda r, key: 0.5 * r["predictions"][key]["prediction"]["lower"])
    assert "results/prefill/p10" not in {f.key for f in verify(resign(fast))}


def test_a_changed_formula_makes_old_predictions_visible(sound, monkeypatch):
    """Mutation: dropping GQA from the cost changes what today's code predicts, and every record says so."""
    from minillm.config import ModelConfig

    monkeypatch.setattr(ModelConfig, "kv_size", property(lambda c: c.num_heads * c.head_dim))
    assert {f.key.split("/")[0] for f in verify(sound)} >= {"predictions"}


def test_a_refuted_prediction_stays_on_file():
    book = Recorder("x", HERE, command="c", setup={})
    expected = book.predict("step", SMOL, "bfloat16", rows=[(1, 64)]).expected
    book.seal()
    book.measured("step", [5 * expected] * 3)
    book.derive("step.residual", "residual", ["step"])
    book.check("ran", True, "")
    done = book.finish()
    assert verify(done) == []
    assert done["derived"]["step.residual"]["median"] == pytest.approx(5)


def test_a_fit_is_refused_on_steps_it_saw(sound):
    from minillm.roofline.stats import derive

    with pytest.raises(MinillmError, match="never saw"):
        derive({"op": "fit_error", "of": ["prefill"], "train": ["prefill"]}, sound)
    assert (
        min(
            fit.fit(
                [(predict.ops_of(p["shape"]), 1.0) for p in sound["predictions"].values()], HERE, "bfloat16"
            ).factors.values()
        )
        >= 0
    )


def test_provenance_names_versions_commit_and_command(sound):
    assert {"python", "torch", "triton", "transformers", "numpy", "commit"} <= sound["software"].keys()
    assert sound["command"].startswith("python3 -m minillm.bench")
    assert sound["predicted_at"] <= sound["measured_at"]
    assert len(sound["prediction_hash"]) == len(sound["hash"]) == 64


# Evidence -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, sound):
    save(sound, tmp_path)
    return tmp_path


def test_numbers_are_looked_up_by_key(folder, sound):
    assert evidence.names(folder) == ["ladder-cpu"]
    assert evidence.value("ladder-cpu/prefill/median", folder) == sound["results"]["prefill"]["median"]
    assert (
        evidence.value("ladder-cpu/prefill/prediction/expected", folder)
        == sound["predictions"]["prefill"]["prediction"]["expected"]
    )
    assert evidence.value("ladder-cpu/ratio/p90", folder) == sound["derived"]["ratio"]["p90"]
    assert evidence.value("ladder-cpu/ceilings/read_bandwidth", folder) == 35e9


def test_a_derived_number_of_a_key_is_found_by_its_own_name(folder, sound):
    path = "ladder-cpu/prefill.tokens_per_s/median"
    assert evidence.value(path, folder) == sound["derived"]["prefill.tokens_per_s"]["median"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("ladder-cpu/prefil/median", "near it: prefill"),
        ("ladder-gpu/prefill/median", "no record 'ladder-gpu'.*ladder-cpu"),
        ("ladder-cpu/prefill/mean", "no 'prefill/mean'"),
    ],
)
def test_a_wrong_key_says_what_is_near(folder, path, message):
    with pytest.raises(MinillmError, match=message):
        evidence.value(path, folder)


def test_text_is_rendered_and_kept_in_step(folder):
    shown = evidence.render("{{ladder-cpu/ratio/median:.2f}} and {{ ladder-cpu/prefill/median*1e3:.1f }} ms", folder)
    ratio, step = (evidence.value(f"ladder-cpu/{k}/median", folder) for k in ("ratio", "prefill"))
    assert shown == f"{ratio:.2f} and {step * 1e3:.1f} ms"
    text = "A step takes <!-- {{ladder-cpu/prefill/median*1e3:.1f}} -->999<!-- / --> ms."
    fresh = evidence.sync(text, folder)
    assert f"-->{step * 1e3:.1f}<!--" in fresh
    assert evidence.sync(fresh, folder) == fresh
    with pytest.raises(MinillmError, match="cannot be shown"):
        evidence.render("{{ladder-cpu/ratio/samples:.2f}}", folder)


def test_table_and_gpu_sentence(folder, tmp_path):
    table = evidence.table("ladder-cpu", ["prefill", "decode_64x1"], ["prefill of 128", "decode"], folder)
    assert table.count("\n") == 3
    assert "| decode |" in table
    h200 = device("h200")
    p = predict.predict_step(preset("llama-3.1-8b"), [(1, 128)], h200)
    none = evidence.gpu("ladder", "decode_64x1", p, h200, folder)
    assert none.startswith("No GPU record yet. Predicted for NVIDIA H200 SXM from its datasheet:")
    card = Device(**{**h200.to_dict(), "source": "measured"})
    save(make(card), tmp_path)
    assert evidence.gpu("ladder", "decode_64x1", p, h200, folder).startswith("Measured on NVIDIA H200 SXM: ")


@pytest.mark.parametrize(
    ("value", "text"), [(70e-3, "70.0 ms"), (3.24e-3, "3.24 ms"), (1.5, "1.50 s"), (8e-8, "80 ns")]
)
def test_seconds_are_shown_in_a_unit_that_reads(value, text):
    assert evidence.seconds(value) == text


def test_the_command_names_file_and_key(folder, sound, capsys):
    from minillm.cli import main

    assert main(["evidence", "check", "--records", str(folder)]) == 0
    assert "1 records, 0 faults" in capsys.readouterr().out
    sound["results"]["prefill"]["median"] = 0.001
    save(resign(sound), folder)
    (folder / "broken.json").write_text("{")
    (folder / "copy.json").write_text((folder / "ladder-cpu.json").read_text())
    assert main(["evidence", "check", "--json", "--records", str(folder)]) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert {("ladder-cpu.json", "results/prefill/median"), ("broken.json", ""), ("copy.json", "name")} <= {
        (f["file"], f["key"]) for f in faults
    }
    assert main(["evidence", "check", "--records", str(folder)]) == 1
    assert "fault  ladder-cpu.json: results/prefill/median is 0.001" in capsys.readouterr().out


def test_the_command_shows_and_renders(folder, tmp_path, capsys):
    from minillm.cli import main

    assert main(["evidence", "show", "ladder-cpu/ceilings/read_bandwidth", "--records", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == "35000000000.0"
    page = tmp_path / "page.md"
    page.write_text("<!-- {{ladder-cpu/ratio/median:.2f}} -->0<!-- / -->")
    arguments = ["evidence", "render", str(page), "--records", str(folder)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    assert main(["evidence", "show", "--records", str(folder)]) == 2
    assert main(["evidence", "check", "--records", str(folder / "nowhere")]) == 2
    assert main(["evidence", "show", "nothing/at/all", "--records", str(folder)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 3  # one line each, no traceback


def test_the_committed_records_are_there_and_sound():
    assert {"ladder-cpu", "single-cpu", "throughput-cpu"} <= set(evidence.names())
    assert evidence.check() == []
