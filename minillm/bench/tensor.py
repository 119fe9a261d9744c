"""A model on N ranks beside the same model in one process: decode steps in turn, equal tokens, time spent speaking.

On a CPU the ranks share the cores, so nothing gets faster: the record shows what the split costs, and whether the cost
model knows it. Several GPUs: cards.py.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from minillm.bench import judge
from minillm.bench.common import Options, progress, random_tokens
from minillm.bench.workloads import Workload
from minillm.config import ModelConfig, dtype_name
from minillm.errors import MinillmError
from minillm.parallel.group import Traffic
from minillm.parallel.messages import HEAD
from minillm.parallel.shard import sizes_that_fit
from minillm.request import SamplingParams
from minillm.roofline.comm import Link
from minillm.roofline.cost import element_size
from minillm.roofline.evidence import seconds

ROWS = (1, 8)
PROMPT, NEW = 48, 12  # tokens of each sequence: prompts of all fit into one step
SAID = ("all_reduce", "all_gather", "broadcast")


def collectives(config: ModelConfig, rows: int, ranks: int, dtype: str) -> list[list[Any]]:
    """[kind, count, bytes of a rank's tensor] of a decode step: what rank 0 tells, the sums, the logits."""
    size = element_size(dtype)
    return [
        ["broadcast", 1, 8 * HEAD],
        ["all_reduce", 2 * config.num_layers + 1, rows * config.hidden_size * size],
        ["all_gather", 1, rows * config.vocab_size // ranks * size],
    ]


def decode(llm: Any, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]], Traffic, int]:
    """Seconds of a decode step in which all take part; all tokens; what this rank said in those steps; their number."""
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=new + len(prompts), ignore_eos=True)
    requests = [engine.make_request(p, params) for p in prompts]
    traffic = engine.spread.ranks.stage.traffic if engine.spread is not None else Traffic()
    begun, steps, total = 0.0, -1, 0.0  # steps: -1 while a prompt is being computed
    run = engine.run(requests)
    for _ in run:
        if steps < 0:
            if all(r.output_token_ids for r in requests):  # from here on all decode
                traffic.clear()
                begun, steps = time.perf_counter(), 0
            continue
        steps, total = steps + 1, time.perf_counter() - begun
        if steps == new - 1:
            break
    said = Traffic(dict(traffic.calls), dict(traffic.bytes), dict(traffic.seconds))
    run.close()
    if steps < 1:
        raise MinillmError(f"no step had all {len(prompts)} sequences: they need {new} tokens more than a prompt")
    return total / steps, [r.output_token_ids[:new] for r in requests], said, steps


def same_tokens(
    book: Any, name: str, llm: Any, prompts: list[list[int]], one: list[list[int]], other: list[list[int]]
) -> None:  # fmt: skip
    """Enter a check: in fp32 the answers of one engine, `llm`, and of the other must be equal.

    In fewer bits two right answers may part where two tokens are as good. There each token of the other is judged by
    the model: whether it is its best, or as near to it as rounding reaches.
    """
    equal = sum(a == b for a, b in zip(one, other, strict=True))
    dtype = dtype_name(llm.engine.model.dtype)
    if dtype == "float32":
        book.check(f"{name} are those of one engine", equal == len(one), f"{equal} of {len(one)} answers, greedy")
        return
    gap, best = judge.worst(llm.engine.model, Workload("", prompts, [len(a) for a in other]), other)
    limit = judge.GAP[dtype]
    detail = f"at most {gap:.1e} of the largest logit below the best, allowed {limit:.0e}; {best:.0%} are the best"
    book.check(f"{name} are the model's", gap <= limit, f"{detail}; {equal} of {len(one)} answers equal one engine's")


class TensorParallel:
    """On one machine's CPU: `LLM` beside `LLM(tensor_parallel_size=N)`, N the least that divides the model."""

    def __init__(self, options: Options, link_of: Callable[[int], Link]):
        """link_of: what joins so many ranks of this machine, which may have to take turns on its cores."""
        from minillm.llm import LLM
        from minillm.models import hub

        self.options, self.repeats = options, options.repeats or 5
        self.threads = torch.get_num_threads()
        folder = hub.resolve(options.model or hub.EMBEDDED)
        self.config = ModelConfig.from_folder(folder)
        self.size = next((n for n in sizes_that_fit(self.config) if n > 1), 0)
        if not self.size:
            raise MinillmError(f"{options.model} does not divide over ranks; give another --model")
        self.link = link_of(self.size)
        how: dict[str, Any] = {
            "dtype": options.dtype,
            "device": "cpu",
            "max_num_seqs": max(ROWS),
            "max_model_len": 2 * (PROMPT + NEW),
        }
        options.out(f"one process, and {self.size} ranks of one thread")
        self.one = LLM(folder, **how)
        try:
            self.many = LLM(folder, tensor_parallel_size=self.size, **how)
            self.rank_threads = torch.get_num_threads()
            self.steps = {rows: self._warm(rows) for rows in ROWS}
            torch.set_num_threads(self.threads)  # for whoever comes next
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for llm in (self.one, getattr(self, "many", None)):
            if llm is not None:
                llm.shutdown()
        torch.set_num_threads(self.threads)

    def _prompts(self, rows: int, turn: int) -> list[list[int]]:
        rng = random.Random(f"{self.options.seed} {rows} {turn}")
        return [random_tokens(rng, PROMPT, self.config.vocab_size) for _ in range(rows)]

    def _turn(self, side: str, prompts: list[list[int]]) -> tuple[float, list[list[int]], Traffic, int]:
        torch.set_num_threads(self.threads if side == "one" else self.rank_threads)
        return decode(self.one if side == "one" else self.many, prompts, NEW)

    def _warm(self, rows: int) -> float:
        """Seconds of one process's decode step, the median of three; both sides' code has run once before."""
        for side in ("many", "one"):
            self._turn(side, self._prompts(rows, -1))
        return statistics.median(self._turn("one", self._prompts(rows, -2 - i))[0] for i in range(3))

    @property
    def setup(self) -> dict[str, Any]:
        return {
            "tp": self.size, "tp_rows": ROWS, "tp_threads": {"one": self.threads, "each rank": self.rank_threads},
            "tp_order": "one many, many one, ...; fresh prompts in every round", "warm_step_s": self.steps,
        }  # fmt: skip

    def expect(self, book: Any) -> None:
        for rows in ROWS:
            book.expect(
                f"decode.tp.x{rows}", "tp_step", step_s=self.steps[rows], ranks=self.size, cores=self.threads,
                alone=self.threads, link=self.link.to_dict(),
                collectives=collectives(self.config, rows, self.size, self.options.dtype),
            )  # fmt: skip

    def measure(self, book: Any) -> None:
        counted, prompts, answers = True, list[list[int]](), dict[str, list[list[int]]](one=[], many=[])
        for rows in progress(ROWS, "tensor parallel"):
            samples: dict[str, list[float]] = {"one": [], "many": [], **{kind: [] for kind in SAID}}
            for turn in range(self.repeats):
                drawn = self._prompts(rows, turn)
                prompts += drawn
                for side in ("one", "many")[:: 1 if turn % 2 == 0 else -1]:
                    step_s, written, said, steps = self._turn(side, drawn)
                    answers[side] += written
                    samples[side].append(step_s)
                    if side == "many":
                        for kind in SAID:
                            samples[kind].append(said.seconds[kind] / steps)
                        counted &= said.calls["all_reduce"] == steps * (2 * self.config.num_layers + 1)
            book.measured(f"decode.one.x{rows}", samples["one"])
            book.measured(f"decode.tp.x{rows}", samples["many"])
            for kind in SAID:
                book.measured(f"said.{kind}.x{rows}", samples[kind], note="of rank 0, a step; waiting included")
            book.derive(f"decode.tp_ratio.x{rows}", "ratio", [f"decode.tp.x{rows}", f"decode.one.x{rows}"])
        torch.set_num_threads(self.threads)
        same_tokens(book, f"tokens of {self.size} ranks", self.one, prompts, answers["one"], answers["many"])
        book.check(
            "two all-reduces a layer and one for the embedding", counted, f"{2 * self.config.num_layers + 1} a step"
        )

    @staticmethod
    def lines(record: dict[str, Any]) -> list[str]:
        setup, results = record["setup"], record["results"]
        lines = [f"{setup['tp']} ranks beside one process, threads {setup['tp_threads']}: a decode step"]
        for rows in setup["tp_rows"]:
            ratio, said = record["derived"][f"decode.tp_ratio.x{rows}"], results[f"said.all_reduce.x{rows}"]
            expected = record["predictions"][f"decode.tp.x{rows}"]["prediction"]["expected"]
            lines.append(
                f"  {rows} rows: {seconds(results[f'decode.tp.x{rows}']['median'])} (predicted {seconds(expected)}) "
                f"beside {seconds(results[f'decode.one.x{rows}']['median'])}: {ratio['median']:.2f} times as long "
                f"(p10 {ratio['p10']:.2f}, p90 {ratio['p90']:.2f}); {seconds(said['median'])} in all-reduces"
            )
        return lines
