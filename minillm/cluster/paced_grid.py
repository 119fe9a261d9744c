"""Shapes that the split planner was never tuned on, and what a paced fleet says of each. Lesson 15.

    python3 -m minillm.cluster.paced_grid docs/pd_split_paced.json

serves them all on a virtual clock, in some minutes of one core, and writes all rows. The same numbers come out on every
machine. docs/pd_split.md shows them, and a test serves one of them again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minillm.cluster.migration import Engine, Wire
from minillm.cluster.paced_goodput import Confirmation, confirm
from minillm.cluster.step_times import Workload
from minillm.errors import MinillmError
from minillm.models.presets import preset
from minillm.roofline.comm import link
from minillm.roofline.device import device
from minillm.trace.latency import SLO

TOLERANCE = 0.20  # of a predicted goodput against the paced one


@dataclass(frozen=True)
class Case:
    """call_us: microseconds of the host a call, a choice, as no datasheet has it. ttft_ms, tpot_ms: the bounds."""

    model: str
    device: str
    call_us: float
    link: str
    engines: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float

    @property
    def engine(self) -> Engine:
        where = replace(device(self.device), call_overhead=self.call_us * 1e-6)
        return Engine(preset(self.model), where, kv_tokens=150_000)

    @property
    def wire(self) -> Wire:
        found = link(self.link)
        return Wire(found.bandwidth, found.start + found.hop, name=found.name)

    @property
    def slo(self) -> SLO:
        return SLO(ttft_s=self.ttft_ms / 1e3, tpot_s=self.tpot_ms / 1e3)

    @property
    def workload(self) -> Workload:
        return Workload(self.prompt_tokens, self.output_tokens)

    def confirm(self, **how: Any) -> Confirmation:
        return confirm(self.engine, self.engines, self.workload, self.slo, self.wire, **how)


# Chosen before any of them was run, with two exceptions. An earlier form of the first showed that requests which join a
# decode engine in one step share what that step costs, which went into the model; and the calls were then made cheaper.
HELD_OUT = (
    Case("qwen3-8b", "h200", 2, "ib400", 4, 700, 60, 300, 6),
    Case("llama-3.1-8b", "h100", 1, "nvlink4", 2, 1537, 40, 300, 7),
    Case("llama-3.1-8b", "h100", 1, "nvlink4", 2, 3000, 40, 500, 30),
    Case("llama-3.1-8b", "a100", 2, "ib400", 3, 1025, 50, 500, 12),
    Case("llama-3.1-8b", "h200", 0, "ib400", 2, 2500, 50, 400, 8),
    Case("llama-3.1-8b", "h100", 2, "eth25", 2, 1537, 40, 600, 8),
    Case("qwen3-8b", "h100", 2, "pcie5", 3, 1793, 32, 400, 8),
    Case("llama-3.2-1b", "l4", 2, "pcie4", 2, 600, 40, 400, 20),
    Case("qwen2.5-7b", "a100", 1, "nvlink3", 3, 1000, 40, 400, 10),
    Case("qwen2.5-7b", "h200", 2, "ib400", 3, 1300, 50, 400, 5),
)


def row(case: Case, c: Confirmation) -> dict[str, Any]:
    """A case's fields, the names of the two pools, goodputs predicted and paced, gains, agreement."""
    return {name: getattr(case, name) for name in Case.__dataclass_fields__} | {
        "colocated": c.colocated, "split": c.split, "predicted": list(c.predicted), "paced": list(c.paced),
        "errors": list(c.errors), "gains": list(c.gains), "agrees": c.agrees, "clear": c.clear,
    }  # fmt: skip


def table(found: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    names = (
        "model, device (call), link", "tokens in, out", "TTFT, TPOT (ms)", "together: predicted, paced",
        "split: predicted, paced", "gain: predicted, paced", "same answer",
    )  # fmt: skip
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for r in found:
        (a, b), (x, y), (g, h) = r["predicted"], r["paced"], r["gains"]
        cells = (
            f"{r['model']}, {r['device']} ({r['call_us']} us), {r['link']}",
            f"{r['prompt_tokens']}, {r['output_tokens']}",
            f"{r['ttft_ms']}, {r['tpot_ms']}",
            f"{r['colocated']}: {a:.3g}, {x:.3g}",
            f"{r['split']}: {b:.3g}, {y:.3g}",
            f"{g:.2f}, {h:.2f}",
            ("yes" if r["agrees"] else "no") + ("" if r["clear"] else ", close"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(paths: Sequence[str]) -> int:
    if len(paths) != 1:
        raise MinillmError("name the file that the rows are written to: docs/pd_split_paced.json")
    found = []
    for i, case in enumerate(HELD_OUT, 1):
        found.append(row(case, case.confirm()))
        print(f"{i} of {len(HELD_OUT)}: {case.model} on {case.device}", file=sys.stderr)
    Path(paths[0]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    from minillm.cli import answer

    sys.exit(answer(lambda: main(sys.argv[1:])))
