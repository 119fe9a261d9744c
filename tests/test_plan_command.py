"""`minillm plan parallel`: words for people, JSON for programs, exit codes for scripts; no option is ignored."""

import json

import pytest

from minillm.cli import main

TWO = ("plan", "parallel", "--model", "llama-3.1-70b", "--count", "2")


def test_a_plan_that_will_do(capsys):
    assert main([*TWO, "--concurrency", "1", "--slo", "tpot=0.02"]) == 0
    out = capsys.readouterr().out
    assert "llama-3.1-70b in bfloat16 on 2 x NVIDIA H200 SXM (datasheet)" in out
    assert "links     NVLink 4 through NVSwitch" in out
    table = [line.split() for line in out.splitlines() if line.startswith("   ")]
    assert table[0][:3] == ["tp", "pp", "dp"]
    assert table[0][6:8] == ["most", "users"]
    assert [line[:3] for line in table[1:]] == [["2", "1", "1"], ["1", "2", "1"], ["1", "1", "2"]]
    assert "why       tp 2 x pp 1 x dp 1: " in out
    assert "would do" not in out
    assert "a datasheet names peaks" in out


def test_a_plan_that_will_not(capsys):
    """Exit code 1, the bound that is missed, and the nearest that would do."""
    assert main([*TWO, "--concurrency", "16", "--slo", "tpot=0.01"]) == 1
    out = capsys.readouterr().out
    assert "slow: TPOT 17.0 ms, over 10.0 ms" in out
    assert "full: 141.1 GB of weights a device, where 126.9 GB may be used" in out
    assert "Nothing keeps the SLO. Nearest: tp 2 x pp 1 x dp 1" in out
    assert "would do  8 devices of this kind (tp 8 x pp 1 x dp 1)" in out


@pytest.mark.parametrize("argv", [("plan", "--json", "parallel"), ("plan", "parallel", "--json")])
def test_json(argv, capsys):
    code = main([*argv, "--count", "2", "--rate", "1000", "--slo", "chat"])
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == 1
    assert found["good"] is False
    assert found["model"] == "llama-3.1-8b"
    assert found["within"]["bandwidth"] == 450e9
    assert found["options"][0]["at"]["ttft_s"] is None  # it grows without end
    assert sum(found["options"][0]["step"][n] for n in ("compute", "all_reduce", "all_gather", "send", "idle")) > 0
    assert any("requests/s" in text for text in found["advice"])


def test_chunks_and_calls(capsys):
    """The best chunk of each option unless one is given; a call of the host costs what is said."""
    ask = ["plan", "parallel", "--count", "2", "--rate", "4", "--slo", "tpot=0.007", "--json"]
    found = []
    for more in ([], ["--max-num-batched-tokens", "8192"], ["--call-overhead", "2"]):
        assert main([*ask, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    best = [f["options"][0] for f in found]
    assert (found[0]["max_num_batched_tokens"][0], found[1]["max_num_batched_tokens"]) == (64, [8192])
    assert best[0]["budget"] < best[1]["budget"] == 8192
    assert best[2]["most"] < best[0]["most"]
    assert main([*ask[:-1]]) == 0
    assert "seats  chunk  verdict" in capsys.readouterr().out


def test_what_is_too_close_is_said(capsys):
    ask = ["plan", "parallel", "--count", "8", "--concurrency", "128"]
    assert main(ask) == 0
    text = capsys.readouterr().out
    assert main([*ask, "--json"]) == 0
    (name,) = json.loads(capsys.readouterr().out)["close"]
    assert f"Too close to call: {name} within 15%" in text
    assert "too close to call: measure both" in text


def test_nodes_and_links(capsys):
    assert main([*TWO[:4], "--count", "16", "--node", "8", "--between", "ib400", "--concurrency", "4"]) == 0
    assert "8 a node, InfiniBand NDR, 400 Gb/s a device between nodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("plan",), "arguments are required: PLAN"),
        (("plan", "parallel", "--rate", "1", "--concurrency", "2"), "give one of them"),
        (("plan", "parallel", "--rate", "-1"), "rate is a number"),
        (("plan", "parallel", "--count", "0"), "count of devices"),
        (("plan", "parallel", "--between", "ib400"), "say with --node"),
        (("plan", "parallel", "--node", "4"), "by which link the nodes are joined"),
        (("plan", "parallel", "--link", "string"), "link 'string' is not known; use one of nvlink4"),
        (("plan", "parallel", "--device", "h300"), "device 'h300' is not known"),
        (("plan", "parallel", "--device", "h300", "--link", "pcie5"), "device 'h300' is not known"),
        (("plan", "parallel", "--model", "gpt-9"), "no shape known here"),
        (("plan", "parallel", "--slo", "fast"), "an SLO is one of"),
        (("plan", "parallel", "--slo", "tpot=0.1,tpot=0.2"), "an SLO bounds tpot once"),
        (("plan", "parallel", "--device", "foo"), "device 'foo' is not known"),
        (("plan", "parallel", "--dtype", "int8"), "dtype 'int8' is not supported"),
        (("plan", "parallel", "--max-tokens", "1"), "output_tokens is a whole number from 2"),
        (("plan", "parallel", "--max-num-seqs", "0"), "max_num_seqs"),
        (("plan", "parallel", "--max-num-batched-tokens", "0"), "max_num_batched_tokens"),
        (("plan", "parallel", "--call-overhead", "-1"), "call_overhead"),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys):
    try:
        code = main(list(argv))
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in " ".join(err.split())
    assert err.count("\n") == 1
