"""The bubble of a pipeline: paced runs through real processes, on a virtual clock (exact) and asleep in real time.

What is measured is busy time over stages times makespan; what is predicted is (S - 1) / (M + S - 1).
"""

from __future__ import annotations

from typing import Any

from minillm.bench.common import Options
from minillm.parallel.pipeline import even, gathered, timetable
from minillm.parallel.processes import run_processes

STAGES = (2, 3, 4)
COUNTS = (1, 2, 4, 8)
ASLEEP = 4  # stages of the runs in real time; they sleep, so there may be more of them than cores
PACE_S = 0.020  # seconds of a stage's work: far above what a message costs


class Bubble:
    def __init__(self, options: Options, pace_s: float = PACE_S):
        self.repeats, self.pace_s, self.out = options.repeats or 3, pace_s, options.out

    @property
    def setup(self) -> dict[str, Any]:
        return {"pace_s": self.pace_s, "stages": STAGES, "micro_batches": COUNTS, "stages_asleep": ASLEEP}

    def expect(self, book: Any) -> None:
        for count in COUNTS:
            for stages in STAGES:
                book.expect(f"bubble.{stages}x{count}", "bubble", stages=stages, micro_batches=count, clock="virtual")
            key = f"bubble.asleep.{ASLEEP}x{count}"
            book.expect(key, "bubble", stages=ASLEEP, micro_batches=count, clock="sleeping")

    def measure(self, book: Any) -> None:
        exact = True
        for stages in STAGES:
            tables = [even(stages, count, self.pace_s) for count in COUNTS]
            for count, table, (run,) in zip(COUNTS, tables, self._run(stages, tables, "virtual", 1), strict=True):
                exact &= sorted(run.slots, key=str) == sorted(timetable(table), key=str)
                book.measured(f"bubble.{stages}x{count}", [run.idle], unit="share")
        tables = [even(ASLEEP, count, self.pace_s) for count in COUNTS]
        for count, runs in zip(COUNTS, self._run(ASLEEP, tables, "sleeping", self.repeats), strict=True):
            book.measured(f"bubble.asleep.{ASLEEP}x{count}", [run.idle for run in runs], unit="share")
        detail = f"{STAGES} stages, {COUNTS} micro-batches: each start and end, to the bit; all outputs right"
        book.check("paced runs on a virtual clock keep to the timetable", exact, detail)

    def _run(self, stages: int, tables: list[Any], clock: str, repeats: int) -> list[list[Any]]:
        """For each table its runs. Tables take turns, so that a busy moment does not fall on one of them."""
        self.out(f"paced runs of {stages} stages, {clock} clock")
        arguments = {"tables": tables * repeats, "clock": clock}
        ranks = run_processes(stages, "minillm.parallel.pipeline:paced_many", arguments)
        runs = [gathered([rank[i] for rank in ranks]) for i in range(len(tables) * repeats)]
        return [runs[i :: len(tables)] for i in range(len(tables))]

    @staticmethod
    def lines(record: dict[str, Any]) -> list[str]:
        lines = ["bubble of paced runs: measured, and (S - 1) / (M + S - 1)"]
        for key, e in record["results"].items():
            if key.startswith("bubble."):
                expected = record["predictions"][key]["prediction"]["expected"]
                stages, count = key.rpartition(".")[2].split("x")
                how = "asleep" if ".asleep." in key else "virtual"
                spread = f" (p10 {e['p10']:.4f}, p90 {e['p90']:.4f})" if how == "asleep" else ""
                lines.append(
                    f"  {stages} stages, {count} micro-batches, {how:<8}{e['median']:.4f}{spread}, "
                    f"formula {expected:.4f}"
                )
        return lines
