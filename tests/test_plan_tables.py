"""docs/parallel.md and docs/pd_split.md say what the functions say, and what their prose says is so."""

from pathlib import Path

import pytest

from minillm.cluster import plan_tables
from minillm.cluster.migration import BUDGETS
from minillm.cluster.plan_tables import ASKED, ENGINE, MARK, TABLES, rows, sync
from minillm.cluster.planner import Demand, Question, fleet_of, plan
from minillm.cluster.split_planner import plan_split
from minillm.errors import MinillmError
from minillm.models.presets import preset
from minillm.roofline.device import DATASHEET
from minillm.roofline.parallel import MEMORY_SHARE

DOCS = Path(__file__).resolve().parents[1] / "docs"
DOC = DOCS / "parallel.md"


def test_the_tables_are_fresh():
    found = []
    for page in ("parallel.md", "pd_split.md"):
        text = (DOCS / page).read_text(encoding="utf-8")
        found += [m[2] for m in MARK.finditer(text)]
        assert sync(text) == text, f"run python3 -m minillm.cluster.plan_tables docs/{page}"
    assert sorted(found) == sorted(TABLES)


def test_the_rows_of_when_a_split_pays_are_what_their_names_say():
    plans = [plan_split(ENGINE, engines, w, slo, wire) for _, engines, w, slo, wire in ASKED]
    assert [p.pays for p in plans] == [True, False, False, False, False]
    for (name, *_), found in zip(ASKED[1:], plans[1:], strict=True):
        assert name in [r.code for r in found.reasons]


def test_a_stale_number_is_seen(monkeypatch):
    monkeypatch.setattr(plan_tables, "TABLES", {"links": TABLES["links"]})
    (match,) = [m for m in MARK.finditer(DOC.read_text(encoding="utf-8")) if m[2] == "links"]
    assert sync(match[0]) == match[0]
    assert sync(match[0].replace("3.19 ms", "3.91 ms")) == match[0]
    with pytest.raises(MinillmError, match="no table 'lonks'; there are links"):
        sync("<!-- table: lonks -->\n<!-- / -->")


def test_the_command_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_tables, "TABLES", {"links": lambda: "| new |"})
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: links -->\nold\n<!-- / -->\nafter\n")
    assert plan_tables.main([str(page)]) == 0
    assert page.read_text() == "before\n<!-- table: links -->\n| new |\n<!-- / -->\nafter\n"
    with pytest.raises(MinillmError, match="name the files"):
        plan_tables.main([])


@pytest.mark.parametrize("device", ["h200", "h100"])
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b"])
def test_what_the_prose_says(model, device, count):
    one, *others = rows(model, device, count, "nvlink4")
    assert (one.tp, one.pp) == (1, 1)
    assert {r.tp * r.pp for r in others} == {count}
    assert one.fits == (model == "llama-3.1-8b")
    tensor, pipeline = others[0], others[-1]
    assert (tensor.tp, pipeline.pp) == (count, count)
    alone = one.decode[1].expected
    assert tensor.decode[1].expected < 0.7 * alone
    assert tensor.decode[1].expected > alone / count  # sums do not shrink
    assert pipeline.decode[1].expected > alone  # no token sooner
    assert pipeline.decode[32].compute * count > 1.3 * one.decode[32].compute  # weights are read several times
    wide = rows(model, device, count, "pcie5", shapes=[(1, 1), (count, 1)])
    assert wide[1].decode[32].expected < wide[0].decode[32].expected
    assert wide[1].prefill.expected > 1.1 * tensor.prefill.expected
    slow = rows(model, device, count, "eth25", shapes=[(1, 1), (count, 1)])
    assert slow[1].decode[32].expected > slow[0].decode[32].expected
    for r in others:
        assert r.fits == (r.weights <= MEMORY_SHARE * DATASHEET[device].memory_bytes)
        assert (r.kv_tokens > 0) == r.fits


def best(model, load, **joined):
    demand = Demand(1000, 200, **load)
    found = plan(Question(preset(model), fleet_of("h200", joined.pop("count", 8), **joined), demand))
    return found.best, found


def test_which_one_then():
    few, many = {"concurrency": 1}, {"concurrency": 2000}
    for joined in ({}, {"within": "pcie5"}, {"node": 4, "between": "eth100"}):
        for model in ("llama-3.1-8b", "llama-3.1-70b"):
            one, found = best(model, few, **joined)
            crowd, _ = best(model, many, **joined)
            assert one.tp >= 4
            assert crowd.tp == (1 if model == "llama-3.1-8b" else 2)  # the least that holds it
            assert crowd.dp * crowd.tp == 8
            if "node" in joined:
                assert one.tp == 4  # not over the slow link
                assert all(o.tp <= 4 or o.tokens_per_s < one.tokens_per_s / 1.15 for o in found.options)
    for count in (2, 8):  # over PCIe, many users: no close call
        crowd, found = best("llama-3.1-8b", many, within="pcie5", count=count)
        assert crowd.dp == count
        assert not any(o.close for o in found.options)
    apart, _ = best("llama-3.1-70b", {"concurrency": 256}, count=2, node=1, between="eth25")
    assert (apart.tp, apart.pp) == (1, 2)  # neither node holds it alone


def test_a_tenth_of_the_memory_holds_the_activations():
    """The largest tensors of a step of 8,192 tokens, all at once: hidden states, an MLP's inner values, logits."""
    assert round(1 - MEMORY_SHARE, 9) == 0.1
    assert "a tenth of the memory is\n  kept free" in DOC.read_text(encoding="utf-8")
    for model in ("llama-3.1-8b", "llama-3.1-70b"):
        c, tokens, rows_, size = preset(model), max(BUDGETS), 256, 2
        inner = 4 * c.hidden_size + c.q_size + 2 * c.kv_size + 3 * c.intermediate_size
        need = size * (tokens * inner + 2 * rows_ * c.vocab_size)
        assert need < (1 - MEMORY_SHARE) * DATASHEET["h100"].memory_bytes
