"""Prefill and decode in two processes beside one that does both, with the very engine and transfer of `minillm serve`.

ttft   a prompt that comes alone: seconds to its first token. The split adds what of the transfer the prefill hides not
gap    streams decode, and such a prompt comes: the longest that any of them waits for a token. One engine computes the
       prompt between their steps; of a split the other engine does, on the same cores or the same card
Both sides take turns; the decode engine of the split, left alone, is the one that does both.

On a CPU: the embedded model in fp32, where all tokens must be equal. On a GPU: two engines on one card,
random weights of real shapes from one seed. In bf16 two right answers may part where two tokens are as good, so there
each token is judged by the model.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from minillm.async_llm import AsyncLLM
from minillm.bench.common import Options, progress, random_tokens
from minillm.bench.split_engines import alone, interrupted, make
from minillm.bench.tensor import same_tokens
from minillm.cache.pool import block_bytes
from minillm.cluster.disagg import Stats
from minillm.cluster.remote_prefill import RemotePrefill
from minillm.cluster.transport import connect
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.parallel.processes import child_environment
from minillm.roofline.evidence import seconds
from minillm.roofline.quantities import predict_quantity

PROMPT = {"cpu": 384, "cuda": 4096}
STREAMS = {"cpu": 3, "cuda": 16}  # that decode while the prompt comes
SHORT, LONG = 16, 400  # tokens of those streams: their prompts, and what they would write; they are left before
NEW = 12  # tokens of the prompt's answer
BUDGET = {"cpu": 512, "cuda": 2048}  # tokens a step
PATIENCE = 300.0  # seconds until the other process is ready
SETTLE = 30.0
BLOCK = 16
SIDES = ("together", "split")


class Split:
    """model: a folder, or a ModelConfig for random weights. rates: of the stages of a transfer, see transfer.py."""

    def __init__(self, options: Options, model: Path | ModelConfig, rates: dict[str, float], prompt: int | None = None):
        kind = "cpu" if options.on_cpu else "cuda"
        self.options, self.rates, self.repeats = options, rates, options.repeats or 5
        self.prompt, self.streams = prompt or PROMPT[kind], STREAMS[kind]
        longest = self.prompt + SHORT + LONG
        self.how = {
            "dtype": options.dtype, "device": options.device, "max_num_seqs": self.streams + 1,
            "max_model_len": longest, "max_num_batched_tokens": BUDGET[kind], "block_size": BLOCK,
            "num_kv_blocks": (self.streams + 1) * -(-longest // BLOCK),
        }  # fmt: skip
        given: Any = str(model) if isinstance(model, Path) else {"config": asdict(model), "seed": options.seed}
        options.out("two engines: one that decodes, and one in another process that computes its prompts")
        self.process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process lives
        self.remote: RemotePrefill | None = None
        self.llm = make(given, self.how)
        try:
            self.vocab = self.llm.engine.model.config.vocab_size
            self._start(given)
            self._warm()
        except BaseException:
            self.close()
            raise

    def _start(self, model: Any) -> None:
        """Start the other process, and connect to it."""
        key = secrets.token_bytes(32)
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from minillm.bench.split_engines import prefill_process; prefill_process()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=child_environment(),
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        # It holds a prompt at a time: its pool need not be as large.
        how = self.how | {"max_num_seqs": 2, "num_kv_blocks": 2 * -(-(self.prompt + 1) // BLOCK)}
        job = {"model": model, "how": how, "key": key.hex(), "threads": torch.get_num_threads()}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            code, said = self.process.wait(), self._said()
            raise MinillmError(f"the prefill process ended with code {code} before it was ready: {said}")
        address = json.loads(line)["address"]
        self.remote = RemotePrefill(self.llm, {"prefill": lambda: connect(address, key)}, lease_s=PATIENCE)
        end = time.monotonic() + PATIENCE
        while not self.remote.states()["ready"]:
            if time.monotonic() > end or self.remote.states()["refused"]:
                raise MinillmError(f"the prefill engine is of no use: {self.remote.states()}")
            time.sleep(0.01)

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-300:]

    def close(self) -> None:
        """End both engines, and the other process."""
        if self.remote is not None:
            self.remote.close()
        self.llm.remote = None
        self.llm.shutdown()
        if self.process is None:
            return
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._log.close()

    def _prompt(self, turn: Any, length: int | None = None) -> list[int]:
        return random_tokens(random.Random(f"{self.options.seed} {turn}"), length or self.prompt, self.vocab)

    def _side(self, side: str) -> AsyncLLM:
        self.llm.remote = self.remote if side == "split" else None
        return self.llm

    def _settle(self) -> None:
        """Wait until nothing is left of the last turn."""
        assert self.remote is not None
        end = time.monotonic() + SETTLE
        while self.llm.core.has_work or self.remote.under_way:
            if time.monotonic() > end:
                raise MinillmError(f"streams that were left still run after {SETTLE:.0f} s")
            time.sleep(0.005)

    def _warm(self) -> None:
        """Both sides' code once; then seconds to a first token of one engine, and of a step."""
        for side in SIDES:
            for i in range(2):
                first, step, _ = asyncio.run(alone(self._side(side), self._prompt(f"warm {side} {i}"), NEW))
                self._settle()
                if side == "together":
                    self.prefill_s, self.step_s = first, step
            others = [self._prompt(f"warm {side} {i}", SHORT) for i in range(self.streams)]
            asyncio.run(interrupted(self.llm, others, LONG, self._prompt(f"warm {side}"), NEW))
            self._settle()

    @property
    def setup(self) -> dict[str, Any]:
        return {
            "split_prompt": self.prompt, "split_new": NEW, "split_streams": self.streams,
            "split_budget": self.how["max_num_batched_tokens"], "split_warm": {
                "prefill_s": self.prefill_s, "step_s": self.step_s,
            },
            "split_order": "together split, split together, ...; fresh prompts in every round",
        }  # fmt: skip

    def expect(self, book: Any) -> None:
        config, dtype = self.llm.engine.model.config, self.llm.engine.model.dtype
        tokens = (self.prompt - 1) // BLOCK * BLOCK
        nbytes, r = tokens * block_bytes(config, 1, dtype.itemsize, "auto"), self.rates
        moved = predict_quantity({
            "quantity": "moved", "nbytes": nbytes, "pieces": config.num_layers,
            "sender": [r["read"], r["crc32"], r["copy"]], "receiver": [r["copy"], r["crc32"], r["write"]],
        })  # fmt: skip
        book.expect(
            "ttft.split", "split_ttft", prefill_s=self.prefill_s, transfer_s=moved["expected"], step_s=self.step_s,
            layers=config.num_layers,
        )  # fmt: skip

    def measure(self, book: Any) -> None:
        assert self.remote is not None
        samples: dict[str, list[float]] = {f"{what}.{side}": [] for what in ("ttft", "gap") for side in SIDES}
        samples |= {"split.transfer": [], "split.exposed": []}
        answers: dict[str, list[list[int]]] = {side: [] for side in SIDES}
        prompts, full = [], True
        self.remote.stats = Stats()  # the warm-up's are not counted
        for turn in progress(range(self.repeats), "split"):
            own, busy = self._prompt(f"{turn} alone"), self._prompt(f"{turn} busy")
            others = [self._prompt(f"{turn} {i}", SHORT) for i in range(self.streams)]
            prompts += [own, busy]
            for side in SIDES[:: 1 if turn % 2 == 0 else -1]:
                before = self.remote.stats.copy()
                first, _, tokens = asyncio.run(alone(self._side(side), own, NEW))
                self._settle()
                if side == "split" and (after := self.remote.stats.copy())["transfers"] > before["transfers"]:
                    for key, name in (("split.transfer", "seconds"), ("split.exposed", "exposed_seconds")):
                        samples[key].append(max(1e-9, after[name] - before[name]))  # no sample is 0
                worst, more, ran = asyncio.run(interrupted(self.llm, others, LONG, busy, NEW))
                self._settle()
                full &= ran
                samples[f"ttft.{side}"].append(first)
                samples[f"gap.{side}"].append(worst)
                answers[side] += [tokens, more]
        for key, taken in samples.items():
            if taken:
                book.measured(key, taken)
        for what in ("ttft", "gap"):
            book.derive(f"{what}.ratio", "ratio", [f"{what}.split", f"{what}.together"])
        if samples["split.transfer"]:
            book.derive("split.exposed_share", "ratio", ["split.exposed", "split.transfer"])
        self._check(book, prompts, answers, full)

    def _check(self, book: Any, prompts: list[list[int]], answers: dict[str, list[list[int]]], full: bool) -> None:
        assert self.remote is not None
        assert self.llm.engine.cache is not None
        stats, count = self.remote.stats.copy(), len(prompts)
        loaded = {str(state): n for (state, _), n in stats["outcomes"].items()}
        book.check("every prompt of the split came with its KV", loaded == {"loaded": count}, f"{loaded} of {count}")
        book.check("the streams ran as long as the prompt took", full, f"{self.streams} of them")
        same_tokens(book, "tokens of the split", self.llm, prompts, answers["together"], answers["split"])
        cache = self.llm.engine.cache
        cache.check()
        free, total = cache.num_free, cache.pool.num_blocks
        book.check("all blocks are free again", free == total, f"{free} of {total}")

    @staticmethod
    def lines(record: dict[str, Any]) -> list[str]:
        setup, results, derived = record["setup"], record["results"], record["derived"]
        lines = [f"prefill and decode in two processes beside one: prompts of {setup['split_prompt']} tokens"]
        for what, words in (("ttft", "first token of a prompt alone"), ("gap", "longest wait of others meanwhile")):
            ratio = derived[f"{what}.ratio"]
            lines.append(
                f"  {words}: {seconds(results[f'{what}.split']['median'])} split, "
                f"{seconds(results[f'{what}.together']['median'])} together; ratio {ratio['median']:.2f} "
                f"(p10 {ratio['p10']:.2f}, p90 {ratio['p90']:.2f})"
            )
        expected = record["predictions"]["ttft.split"]["prediction"]["expected"]
        lines.append(f"  predicted first token of the split: {seconds(expected)}")
        if "split.exposed_share" in derived:
            lines.append(
                f"  transfer {seconds(results['split.transfer']['median'])}, of which the prefill hid "
                f"{1 - derived['split.exposed_share']['median']:.0%}"
            )
        return lines
