"""Tables by prediction: plans of H200 pairs and 8-card nodes, and when a split pays. Lessons 14 and 15.

    python3 -m minillm.cluster.plan_tables docs/parallel.md docs/pd_split.md

writes them anew between their markers; a test says when they are stale. Nothing in them is measured. What a paced fleet
found is in docs/pd_split_paced.json; `python3 -m minillm.cluster.paced_grid docs/pd_split_paced.json` writes that anew.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minillm.cluster import split_reasons
from minillm.cluster.migration import Engine, Wire, crossover
from minillm.cluster.operating_point import Demand
from minillm.cluster.paced_grid import table
from minillm.cluster.plan_advice import gain_words
from minillm.cluster.planner import Question, fleet_of, plan
from minillm.cluster.split_planner import plan_split
from minillm.cluster.step_times import Workload
from minillm.errors import MinillmError
from minillm.models.presets import preset
from minillm.roofline.comm import LINKS, link
from minillm.roofline.device import DATASHEET
from minillm.roofline.evidence import seconds
from minillm.roofline.parallel import Step, predict_parallel, rank_memory
from minillm.trace.latency import SLO, slo

CONTEXT, PROMPT = 2048, 2048  # tokens that a decode sees, tokens of a prompt
MARK = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n)(.*?)(<!-- / -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """A model over tp x pp devices of a kind, in bf16: predicted steps, and what a rank holds.

    decode  by batch size, of CONTEXT tokens each;  prefill  of one prompt of PROMPT tokens, first chunk to last token
    """

    tp: int
    pp: int
    weights: int
    kv_tokens: int
    fits: bool
    decode: dict[int, Step]
    prefill: Step


def rows(
    model: str, device: str, count: int, at: str, batches: Sequence[int] = (1, 32, 128),
    shapes: Iterable[tuple[int, int]] | None = None,
) -> list[Row]:  # fmt: skip
    """tp x pp = 1, and every way to use all `count` devices for one copy of the model. at: the link between them."""
    config, card, wire = preset(model), DATASHEET[device], link(at)
    if shapes is None:
        powers = [2**i for i in range(count.bit_length()) if count % 2**i == 0]
        shapes = [(1, 1), *((tp, count // tp) for tp in reversed(powers))]
    found = []
    for tp, pp in shapes:
        memory = rank_memory(config, card, tp=tp, pp=pp)

        def step(work: list[tuple[int, int]], tp: int = tp, pp: int = pp) -> Step:
            return predict_parallel(config, work, card, tp=tp, pp=pp, tp_link=wire, pp_link=wire)

        decode = {b: step([(1, CONTEXT)] * b) for b in batches}
        found.append(Row(tp, pp, memory.weights, memory.kv_tokens, memory.fits, decode, step([(PROMPT, 0)])))
    return found


def node_table(model: str, device: str, count: int, at: str) -> str:
    found = rows(model, device, count, at)
    batches = list(found[0].decode)
    lines = [
        "| tp x pp | weights a card | KV tokens | " + " | ".join(f"decode of {b}" for b in batches)
        + f" | messages, idle at {batches[-1]} | prefill of {PROMPT} |",
        "|---|---|---|" + "---|" * (len(batches) + 2),
    ]  # fmt: skip
    for r in found:
        s = r.decode[batches[-1]]
        said = (s.all_reduce + s.all_gather + s.send) / s.expected
        kv = f"{r.kv_tokens:,}" if r.fits else "does not fit"
        fit = [seconds(r.decode[b].expected) if r.kv_tokens >= b * CONTEXT else "-" for b in batches]
        share = f"{said:.0%}, {s.idle / s.expected:.0%}" if r.kv_tokens >= batches[-1] * CONTEXT else "-"
        lines.append(
            f"| {r.tp} x {r.pp} | {r.weights / 1e9:.1f} GB | {kv} | {' | '.join(fit)} | {share} "
            f"| {seconds(r.prefill.expected) if r.fits else '-'} |"
        )
    return "\n".join(lines)


def links_table() -> str:
    """A decode step of one token and a prefill, over every link: two H200 that share the 8 B model."""
    config, card = preset("llama-3.1-8b"), DATASHEET["h200"]
    alone = [predict_parallel(config, work, card).expected for work in _WORK.values()]
    lines = ["| link | one way | one sum of 8 kB | " + " | ".join(f"tp 2: {name}" for name in _WORK) + " |",
             "|---|---|---|" + "---|" * len(_WORK),
             "| one card | - | - | " + " | ".join(map(seconds, alone)) + " |"]  # fmt: skip
    for wire in LINKS.values():
        steps = [predict_parallel(config, work, card, tp=2, tp_link=wire).expected for work in _WORK.values()]
        texts = [f"{seconds(t)}, x {t / a:.2f}" for t, a in zip(steps, alone, strict=True)]
        cells = [wire.name, f"{wire.bandwidth / 1e9:g} GB/s", seconds(wire.all_reduce(8192, 2)), *texts]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_WORK = {
    "decode of 1": [(1, CONTEXT)],
    "decode of 64": [(1, CONTEXT)] * 64,
    f"prefill of {PROMPT}": [(PROMPT, 0)],
}


def plans_table(device: str, count: int, **joined: Any) -> str:
    """What the planner says to some questions about so many devices: best, and what follows. joined: see fleet_of."""
    lines = ["| model | load (1,000 tokens in, 200 out) | SLO | best | it gives | next | why not the next |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for model in ("llama-3.1-8b", "llama-3.1-70b"):
        for load, bounds in _LOADS:
            demand = Demand(1000, 200, **load)  # type: ignore[arg-type]
            asked = slo(bounds) if bounds else SLO()
            found = plan(Question(preset(model), fleet_of(device, count, **joined), demand, asked))
            best, second = found.options[:2]
            many = load.get("concurrency")
            text = f"{load['rate']:g} requests/s" if many is None else "1 user" if many == 1 else f"{many:,} users"
            tpot = seconds(best.at.tpot_s) if best.at else "-"
            gives = f"{gain_words(found.question, best)}, TPOT {tpot}, chunk {best.budget}"
            name = best.name if found.good else f"none; nearest {best.name}"
            lines.append(
                f"| {model} | {text} | {bounds or 'none'} | {name} | {gives if found.good else best.why} "
                f"| {second.name} | {second.why} |"
            )
    return "\n".join(lines)


_LOADS: tuple[tuple[dict[str, float], str], ...] = (
    ({"concurrency": 1}, ""), ({"concurrency": 64}, ""), ({"concurrency": 2000}, ""),
    ({"rate": 4.0}, "chat"), ({"rate": 4.0}, "tpot=0.007"),
)  # fmt: skip

# When a split pays ---------------------------------------------------------------------------------------------------


CALL_US = 2  # a choice: what an operator call costs the host, which no datasheet names
ENGINE = Engine(preset("llama-3.1-8b"), replace(DATASHEET["h200"], call_overhead=CALL_US * 1e-6))
WIRE = Wire(LINKS["ib400"].bandwidth, LINKS["ib400"].start + LINKS["ib400"].hop, name="ib400")
SLO_ = SLO(ttft_s=2.0, tpot_s=0.0065)
# (what differs, engines, workload, bounds, link): the first pays, each other one differs in what its name says
ASKED: tuple[tuple[str, int, Workload, SLO, Wire], ...] = (
    ("long prompts, tight TPOT", 4, Workload(4097, 256), SLO_, WIRE),
    (split_reasons.LOADS, 4, Workload(4097, 256, 5.0), SLO_, WIRE),
    (split_reasons.PROMPTS, 4, Workload(200, 256), SLO_, WIRE),
    (split_reasons.LINKS, 4, Workload(4097, 256), SLO_, Wire(1e9, 1e-4, name="1 GB/s")),
    (split_reasons.POOLS, 2, Workload(1032, 256), SLO(ttft_s=2.0, tpot_s=0.0047), WIRE),
)


def verdicts() -> str:
    """When it pays, and what each reason against it looks like."""
    lines = ["| | engines | tokens in, out | TPOT | together | best split | gain | answer |", "|---" * 8 + "|"]
    for name, engines, workload, bounds, wire in ASKED:
        p = plan_split(ENGINE, engines, workload, bounds, wire)
        best = p.splits[0]
        said = "yes" if p.pays else "no: " + "; ".join(r.words for r in p.reasons if r.code == name)
        said = said if p.clear else "too close to call"
        cells = (
            name,
            str(engines),
            f"{workload.prompt_tokens}, {workload.output_tokens}",
            f"{1e3 * (bounds.tpot_s or 0):g} ms",
            f"{p.colocated.goodput:.3g}/s",
            f"{best.name}: {best.goodput:.3g}/s",
            f"{p.gain:.2f}",
            said,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def crossovers() -> str:
    """Bandwidth above which moving KV that exists is quicker than computing it."""
    lines = ["| prompt | crossover | links of the table above it |", "|---" * 3 + "|"]
    for m in (129, 513, 2049, 8193, 32769):
        edge = crossover(ENGINE, m, WIRE)
        above = ", ".join(name for name, wire in LINKS.items() if wire.bandwidth > edge)
        lines.append(f"| {m} | {edge / 1e9:.3g} GB/s | {above} |")
    return "\n".join(lines)


def paced(path: Path | None = None) -> str:
    """The rows of the file beside the page."""
    path = path or Path(__file__).resolve().parents[2] / "docs" / "pd_split_paced.json"
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return table(found)


TABLES: dict[str, Callable[[], str]] = {
    "links": links_table,
    "two-h200-8b": lambda: node_table("llama-3.1-8b", "h200", 2, "nvlink4"),
    "two-h200-70b": lambda: node_table("llama-3.1-70b", "h200", 2, "nvlink4"),
    "two-h200-70b-pcie": lambda: node_table("llama-3.1-70b", "h200", 2, "pcie5"),
    "eight-h200-8b": lambda: node_table("llama-3.1-8b", "h200", 8, "nvlink4"),
    "eight-h200-70b": lambda: node_table("llama-3.1-70b", "h200", 8, "nvlink4"),
    "eight-h100-70b": lambda: node_table("llama-3.1-70b", "h100", 8, "nvlink4"),
    "plans-two": lambda: plans_table("h200", 2),
    "plans-eight": lambda: plans_table("h200", 8),
    "plans-pcie": lambda: plans_table("h200", 8, within="pcie5"),
    "plans-nodes": lambda: plans_table("h200", 8, node=4, between="eth100"),
    "split-verdicts": verdicts,
    "split-crossovers": crossovers,
    "split-paced": paced,
}


def sync(text: str) -> str:
    """The text with every table between its markers written anew. MinillmError for a table that is not known."""

    def fresh(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise MinillmError(f"no table {match[2]!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[match[2]]()}\n{match[4]}"

    return MARK.sub(fresh, text)


def main(paths: Sequence[str]) -> int:
    if not paths:
        raise MinillmError("name the files whose tables are to be written: docs/parallel.md docs/pd_split.md")
    for path in map(Path, paths):
        path.write_text(sync(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    from minillm.cli import answer

    sys.exit(answer(lambda: main(sys.argv[1:])))
