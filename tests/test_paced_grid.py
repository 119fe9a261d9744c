"""docs/pd_split_paced.json: what the planner predicts is today's, and a row of what the fleet found comes out again."""

import json
from pathlib import Path

import pytest

from minillm.cluster import paced_grid
from minillm.cluster.paced_grid import HELD_OUT, TOLERANCE, main
from minillm.cluster.split_planner import plan_split
from minillm.errors import MinillmError

DOCS = Path(__file__).resolve().parents[1] / "docs"
ROWS = json.loads((DOCS / "pd_split_paced.json").read_text(encoding="utf-8"))
CHEAP = 1  # of the rows, the one that is served soonest


def test_the_fleet_found_what_was_predicted():
    """Predictions are today's, goodputs agree within the tolerance, and the answer is the same in all clear cases."""
    assert len(ROWS) == len(HELD_OUT)
    for case, kept in zip(HELD_OUT, ROWS, strict=True):
        plan = plan_split(case.engine, case.engines, case.workload, case.slo, case.wire, explain=False)
        assert kept["prompt_tokens"] == case.prompt_tokens
        assert kept["predicted"] == pytest.approx([plan.colocated.goodput, plan.splits[0].goodput], rel=1e-6)
        assert max(map(abs, kept["errors"])) <= TOLERANCE
        assert kept["agrees"] or not kept["clear"]
    assert {r["gains"][1] >= 1.1 for r in ROWS if r["clear"]} == {True, False}


def test_a_row_comes_out_again(tmp_path, monkeypatch):
    """Plan, both fleets, and the search for the rates that they serve: by the command that writes the file."""
    monkeypatch.setattr(paced_grid, "HELD_OUT", HELD_OUT[CHEAP : CHEAP + 1])
    assert main([str(tmp_path / "rows.json")]) == 0
    (found,) = json.loads((tmp_path / "rows.json").read_text())
    for name, value in ROWS[CHEAP].items():  # the last digits are the processor's
        assert found[name] == (pytest.approx(value) if isinstance(value, list) else value), name
    with pytest.raises(MinillmError, match="name the file"):
        main([])
