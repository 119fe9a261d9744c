"""The command line: every bad input is one line and exit code 2; --help shows an example; --json is JSON."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from minillm.cli import COMMANDS, main

HI = ("generate", "hi")
ROOF = ("roofline", "--device", "h200")
BAD = [
    ((), "arguments are required: COMMAND"),
    (("nosuch",), "invalid choice: 'nosuch'"),
    (("--bogus",), "arguments are required: COMMAND"),
    (("generate",), "arguments are required: prompt"),
    ((*HI, "--max-tokens", "0"), "max_tokens: expected at least 1, got 0"),
    ((*HI, "--max-tokens", "x"), "invalid int value: 'x'"),
    ((*HI, "--temperature", "nan"), "temperature: expected a finite number, got nan"),
    ((*HI, "--temperature", "-1"), "temperature: expected at least 0.0"),
    ((*HI, "--top-p", "0"), "top_p: expected above 0.0"),
    ((*HI, "--top-k", "-5"), "top_k: expected at least -1, got -5"),
    ((*HI, "--min-p", "2"), "min_p: expected at least 0.0 and at most 1.0"),
    ((*HI, "--seed", "99999999999999999999"), "seed: expected at least 0"),
    ((*HI, "--stop", ""), "stop: expected non-empty strings"),
    ((*HI, "--stop", "\udc80"), "stop: '\\udc80' holds half of a surrogate pair"),
    ((*HI, "--dtype", "int8"), "dtype 'int8' is not supported"),
    ((*HI, "--device", "tpu"), "device 'tpu' is not known"),
    ((*HI, "--device", "cpu:7"), "device 'cpu:7' is not known"),
    ((*HI, "--kv-cache", "x"), "kv_cache 'x' is not known"),
    ((*HI, "--max-model-len", "0"), "max_model_len must be a positive whole number"),
    ((*HI, "--threads", "0"), "threads must be a positive whole number"),
    ((*HI, "--threads", "99999999"), "threads must be at most 1024"),
    ((*HI, "--model", "nope"), "no model 'nope'"),
    ((*HI, "--model", ""), "no model ''"),
    ((*HI, "--model", "~nouser/x"), "model '~nouser/x' cannot be looked up"),
    ((*HI, "--model", "x" * 5000), "cannot be looked up"),
    ((*HI, "--model", "a\0b"), "no model"),
    ((*HI, "--model", "no-such-org/no-such-model"), "from the Hugging Face hub"),
    ((*HI, "--json", "--model", "nope"), "no model 'nope'"),
    (("chat", "--max-tokens", "0"), "max_tokens: expected at least 1"),
    (("chat", "--model", "nope"), "no model 'nope'"),
    ((*ROOF, "--batch", "0"), "--batch must be a whole number from 1"),
    ((*ROOF, "--batch", "9" * 30), "--batch must be a whole number from 1"),
    ((*ROOF, "--context", "-1"), "--context must be a whole number from 0"),
    ((*ROOF, "--context", "1e9"), "invalid int value: '1e9'"),
    ((*ROOF, "--prefill", "0"), "--prefill must be a whole number from 1"),
    ((*ROOF, "--dtype", "int8"), "dtype 'int8' is not supported"),
    ((*ROOF, "--model", ""), "model '' is no shape known here"),
    ((*ROOF, "--model", "x" * 5000), "File name too long"),
    ((*ROOF, "--remeasure"), "known by its datasheet only"),
    (("roofline", "--device", "nope"), "device 'nope' is not known"),
    (("fetch", "nope"), "no model 'nope'"),
    (("fetch", ""), "no model ''"),
    (("fetch", "a", "b"), "unrecognized arguments: b"),
    (("fetch", "tests"), "tests has no config.json"),
    (("doctor", "extra"), "unrecognized arguments: extra"),
    (("doctor", "--remeasure", "--no-measure"), "not allowed with argument --remeasure"),
    (("load", "--cv", "3"), "--cv belongs to --arrivals bursty"),
    (("load", "--last-rate", "3"), "--last-rate belongs to --arrivals ramp"),
    (("load", "--concurrency", "2", "--arrivals", "poisson"), "--arrivals belongs to an open loop"),
    (("load", "--rate", "inf", "--arrivals", "ramp"), "--arrivals belongs to an open loop"),
    (("evidence",), "arguments are required: action"),
    (("evidence", "check", "--check"), "evidence check would ignore it"),
    (("evidence", "check", "x"), "evidence check takes no 'x'"),
    (("evidence", "show"), "needs RECORD/KEY/FIELD"),
    (("evidence", "show", "nope/a/b"), "no record 'nope'"),
    (("evidence", "render", "nope"), "nope cannot be read"),
    (("evidence", "check", "--records", "nope"), "nope is not a folder"),
    (("grade", "99"), "no checks for lesson '99'"),
    (("grade", "--dir", "nope"), "there is no folder nope"),
    (("grade", "--dir", "x" * 5000), "File name too long"),
    (("grade", "--timeout", "nan"), "--timeout must be above 0"),
    (("grade", "--memory", "0"), "--memory must be at least 256"),
    (("grade", "--jobs", "0"), "--jobs must be at least 1"),
    (("bench",), "arguments are required: step"),
    (("bench", "ladder", "--peer", "x"), "--peer belongs to single and throughput"),
    (("bench", "ladder", "--contexts", "a"), "--contexts must look like"),
    (("course",), "arguments are required: ACTION"),
    (("course", "run", "99"), "no lesson 99"),
    (("course", "exercises", "--check", "--solutions", "nope"), "nope holds no NN_topic.ipynb"),
    (("course", "export-nbgrader", "tests"), "is not an empty folder"),
]


def run(*argv):
    """The exit code of a command, also where argparse ends it."""
    try:
        return main(argv)
    except SystemExit as end:
        return end.code


def one_line(err: str) -> str:
    """The whole of stderr, which must be one line of the agreed form."""
    assert err.startswith("minillm: error: "), err
    assert err.count("\n") == 1, err
    assert err.endswith("\n"), err
    return err


@pytest.mark.parametrize(
    ("argv", "message"), BAD, ids=[" ".join(argv)[:50].encode("unicode_escape") for argv, _ in BAD]
)
def test_bad_input_is_one_line_and_exit_code_2(argv, message, capsys):
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in one_line(err)


@pytest.mark.parametrize(
    "command", [(), *((c,) for c in COMMANDS), ("course", "run"), ("course", "exercises")], ids=" ".join
)
def test_help_shows_an_example(command, capsys):
    assert run(*command, "--help") == 0
    assert f"example: minillm {' '.join(command)}".rstrip() in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json(command, capsys):
    run(command, "--help")
    assert "--json" in capsys.readouterr().out


def answer(capsys, *argv):
    """What a command printed with --json: one value, and no NaN or infinity in it."""
    assert run(*argv, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.model
def test_generate_json(embedded_folder, capsys):
    said = answer(capsys, "generate", "What is the capital of France?", "--max-tokens", "8", "--threads", "1")
    assert said["text"] == "The capital of France is Paris."
    assert (len(said["token_ids"]), said["finish_reason"], said["stop_reason"]) == (8, "stop", None)
    assert said["prompt_tokens"] > 8
    assert min(said[k] for k in ("seconds_to_load", "time_to_first_token", "tokens_per_second")) > 0


@pytest.mark.model
def test_fetch_json(embedded_folder, capsys):
    said = answer(capsys, "fetch")
    assert (said["name"], said["folder"]) == ("smollm2-135m", str(embedded_folder))
    assert said["bytes"] > 2 * 134e6  # bf16


def test_doctor_json(capsys):
    said = answer(capsys, "doctor", "--no-measure")
    assert said["kind"] in ("cpu", "cuda")
    assert "torch" in said["versions"]
    assert said["missing_needed"] == []
    assert [entry["lesson"][:2] for entry in said["lessons"]][:2] == ["00", "01"]


@pytest.mark.parametrize("extra", [(), ("--batch", "1000", "--context", "100000000"), ("--prefill", "1000000")])
def test_roofline_json(extra, capsys):
    said = answer(capsys, *ROOF, "--model", "llama-3.1-8b", *extra)
    low, high = said["tokens_per_s_bounds"]
    assert 0 < low <= said["tokens_per_s"] <= high
    assert said["fits"] is (not extra)


def test_evidence_json(capsys):
    code = run("evidence", "check", "--json")  # whether the records are sound is the matter of test_records.py
    said = json.loads(capsys.readouterr().out)
    assert code == (1 if said["faults"] else 0)
    assert "single-cpu" in said["records"]


def test_grade_json(tmp_path, capsys):
    (tmp_path / "00_roofline.ipynb").write_text("{")
    said = answer(capsys, "grade", "--dir", str(tmp_path))
    assert said["points"] == 0 < said["possible"]
    assert said["next"]["task"].startswith("00")


# The world around the command: caches that cannot be made, streams that are closed, readers that leave.


@pytest.mark.parametrize("argv", [("doctor", "--no-measure"), ("fetch",), HI])
def test_a_cache_that_cannot_be_made(argv, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file" / "cache"))
    assert run(*argv) == 2
    assert "the cache folder cannot be made" in one_line(capsys.readouterr().err)
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    (tmp_path / "models").write_text("")
    if argv[0] != "doctor":
        assert run(*argv) == 2
        assert "set MINILLM_CACHE to a folder" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("stdin", [None, io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8")])
def test_a_prompt_from_a_closed_or_binary_input(stdin, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run("generate", "-") == 2
    assert "standard input is closed or not text" in one_line(capsys.readouterr().err)


@pytest.mark.model
def test_chat_with_a_closed_input_ends(embedded_folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert run("chat", "--max-model-len", "64") == 0


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(*_):  # not by a signal: a shell's background jobs ignore SIGINT, and so does what they start
        raise KeyboardInterrupt

    monkeypatch.setattr("minillm.models.hub.resolve", interrupted)
    assert run(*HI) == 130
    assert capsys.readouterr().err == "minillm: interrupted\n"


def shell(script: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"MINILLM": f"{sys.executable} -m minillm"}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, env=environment, check=False
    )


def test_a_reader_that_leaves_is_no_fault():
    done = shell("$MINILLM roofline --device h200 | true")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_cannot_show_a_character_gets_its_number():
    code = "import minillm.cli, minillm.commands.fetch as f; f.run = lambda args: print('\\u00e9') or 0; "
    code += "raise SystemExit(minillm.cli.main(['fetch']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\xe9\n", b"")


@pytest.mark.parametrize("port", [0, -1, 65536, 70000])
def test_lab_refuses_a_port_that_is_none(port, monkeypatch, capsys):
    from minillm.course import lab

    monkeypatch.setattr(sys, "argv", ["lab", "--port", str(port)])
    assert lab.main() == 2
    assert f"port must be from 1 to 65535, got {port}" in one_line(capsys.readouterr().err)


def test_lab_refuses_a_port_that_is_no_number(monkeypatch, capsys):
    from minillm.course import lab

    monkeypatch.setattr(sys, "argv", ["lab", "--port", "x"])
    with pytest.raises(SystemExit, match="2"):
        lab.main()
    assert "invalid int value: 'x'" in one_line(capsys.readouterr().err)
