"""A prompt's KV from one process's pool into another's through shared memory, layer by layer. Lesson 15.

Before the seal each stage is timed alone: reading a layer's tokens out of the pool (on a GPU they cross the bus), their
checksum, the copy into shared memory; out of it, the checksum again, and writing them into a pool. From these rates
follows what a transfer takes when both processes work at the same time. On one GPU both pools lie on that card.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from minillm.bench.common import Options, progress, synchronize
from minillm.cache.pool import KVPool, block_bytes
from minillm.cluster.importer import checksum
from minillm.cluster.transport import Channel, ChannelClosed, connect, listen
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.parallel.processes import child_environment
from minillm.roofline.evidence import seconds

TOKENS = {"cpu": (64, 512), "cuda": (256, 1024, 4096)}
BLOCK = 16
PATIENCE = 300.0
PROBE = 32 << 20  # bytes of the copy that stands for a ring: as large as the window


class Pool:
    """A pool of one sequence's tokens, filled with random values from `seed` (None: left as it is)."""

    def __init__(self, config: ModelConfig, tokens: int, dtype: str, device: str, seed: int | None = None):
        blocks = -(-tokens // BLOCK)
        self.pool = KVPool(config, blocks, BLOCK, getattr(torch, dtype), device=torch.device(device))
        self.table, self.layers = list(range(blocks, 0, -1)), config.num_layers  # not in order: as a table is
        if seed is not None:
            generator = torch.Generator(device=device).manual_seed(seed)
            for t in (self.pool.k, self.pool.v):
                t.normal_(generator=generator)

    def read(self, layer: int, tokens: int) -> list[torch.Tensor]:
        return self.pool.read_tokens(layer, self.table, 0, tokens)


def send(channel: Channel, pool: Pool, tokens: int) -> None:
    for layer in range(pool.layers):
        tensors = pool.read(layer, tokens)
        channel.send({"do": "piece", "layer": layer, "crc32": checksum(tensors)}, tensors)


def receiver() -> None:
    """The other process: says "ready", then does what it is told. "end": how many pieces had a wrong checksum."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    fields: Mapping[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in job["model"].items()}
    pool = Pool(ModelConfig(**fields), job["tokens"], job["dtype"], job["device"])
    key = bytes.fromhex(sys.stdin.readline().strip())  # a secret is no argument: others can read those
    channel = connect(job["address"], key)
    channel.send({"do": "ready"})
    wrong = 0
    while True:
        try:
            got = channel.recv(PATIENCE)
        except ChannelClosed:  # the bench has ended
            return
        if got is None:
            continue
        message, tensors = got
        if message["do"] == "piece":
            wrong += checksum(tensors) != message["crc32"]
            pool.pool.write_tokens(message["layer"], pool.table, 0, tensors)
        elif message["do"] == "end":
            synchronize(job["device"])
            channel.send({"do": "done", "wrong": wrong})
            wrong = 0
        elif message["do"] == "show":
            channel.send({"do": "shown"}, pool.read(message["layer"], message["tokens"]))


class KVTransfer:
    def __init__(self, options: Options, config: ModelConfig, tokens: tuple[int, ...] | None = None):
        self.options, self.config, self.repeats = options, config, options.repeats or 7
        self.tokens = tokens or TOKENS["cpu" if options.on_cpu else "cuda"]
        most = max(self.tokens)
        self.pool = Pool(config, most, options.dtype, options.device, options.seed)
        self.nbytes = block_bytes(config, 1, self.pool.pool.dtype.itemsize, "auto")
        options.out(f"KV of up to {most} tokens, {most * self.nbytes / 1e6:.0f} MB, to another process")
        self.rates = self._rates(most)
        key = secrets.token_bytes(32)
        self.listener = listen("shared-memory", key)
        self.channel: Channel | None = None
        try:
            job = {"address": self.listener.address, "model": asdict(config), "tokens": most, "dtype": options.dtype,
                   "device": options.device, "threads": torch.get_num_threads()}  # fmt: skip
            code = "from minillm.bench.transfer import receiver; receiver()"
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(job)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=child_environment(),
            )  # fmt: skip
            assert self.process.stdin is not None
            self.process.stdin.write(key.hex() + "\n")
            self.process.stdin.flush()
            self.channel = self.listener.accept(PATIENCE)
            self._answer("ready")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the other process."""
        if self.channel is not None:
            self.channel.close()
        self.listener.close()
        if (process := getattr(self, "process", None)) is None:
            return
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stderr):
            pipe.close()

    def _answer(self, what: str) -> Any:
        got = self.channel.recv(PATIENCE) if self.channel is not None else None
        if got is None or got[0]["do"] != what:
            raise MinillmError(f"the receiving process did not answer {what!r}: {self._last_words()}")
        return got

    def _last_words(self) -> str:
        if self.process.poll() is None:
            return "it still runs"
        assert self.process.stderr is not None
        return f"it ended with {self.process.returncode}: {self.process.stderr.read().strip()[-300:]}"

    def _rates(self, tokens: int) -> dict[str, float]:
        """bytes/s of each stage alone: the median of five passes over all layers."""
        other = Pool(self.config, tokens, self.options.dtype, self.options.device)
        pieces = [self.pool.read(layer, tokens) for layer in range(self.config.num_layers)]
        source, target = memoryview(bytearray(PROBE)), memoryview(bytearray(PROBE))

        def copy() -> None:
            target[:] = source

        def write() -> None:
            for layer, tensors in enumerate(pieces):
                other.pool.write_tokens(layer, other.table, 0, tensors)
            synchronize(self.options.device)

        whole = tokens * self.nbytes
        stages: dict[str, tuple[int, Callable[[], Any]]] = {
            "read": (whole, lambda: [self.pool.read(layer, tokens) for layer in range(self.config.num_layers)]),
            "crc32": (whole, lambda: [checksum(tensors) for tensors in pieces]),
            "copy": (PROBE, copy), "write": (whole, write),
        }  # fmt: skip
        found = {}
        for name, (nbytes, run) in stages.items():
            times = []
            for _ in range(6):
                begun = time.perf_counter()
                run()
                times.append(time.perf_counter() - begun)
            found[name] = nbytes / statistics.median(times[1:])
        return found

    @property
    def setup(self) -> dict[str, Any]:
        return {"kv_tokens": self.tokens, "kv_bytes_per_token": self.nbytes, "kv_rates": self.rates, "kv_block": BLOCK}

    def expect(self, book: Any) -> None:
        r = self.rates
        for tokens in self.tokens:
            book.expect(
                f"transfer.{tokens}", "moved", nbytes=tokens * self.nbytes, pieces=self.config.num_layers,
                sender=[r["read"], r["crc32"], r["copy"]], receiver=[r["copy"], r["crc32"], r["write"]],
            )  # fmt: skip

    def measure(self, book: Any) -> None:
        samples: dict[int, list[float]] = {tokens: [] for tokens in self.tokens}
        wrong = 0
        assert self.channel is not None
        for turn in progress(range(-1, self.repeats), "transfer"):
            for tokens in self.tokens[:: 1 if turn % 2 else -1]:
                begun = time.perf_counter()
                send(self.channel, self.pool, tokens)
                self.channel.send({"do": "end"})
                wrong += self._answer("done")[0]["wrong"]
                if turn >= 0:  # the first round touches memory
                    samples[tokens].append(time.perf_counter() - begun)
        for tokens, taken in samples.items():
            book.measured(f"transfer.{tokens}", taken)
            book.derive(f"transfer.{tokens}.bytes_per_s", "rate", [f"transfer.{tokens}"], count=tokens * self.nbytes)
            book.derive(f"transfer.{tokens}.residual", "residual", [f"transfer.{tokens}"])
        equal = True
        for layer in range(self.config.num_layers):
            self.channel.send({"do": "show", "layer": layer, "tokens": max(self.tokens)})
            there = self._answer("shown")[1]
            equal &= all(
                a.shape == b.shape and torch.equal(a, b)
                for a, b in zip(self.pool.read(layer, max(self.tokens)), there, strict=True)
            )
        book.check("the other pool holds the same KV, to the bit", equal, f"{self.config.num_layers} layers")
        book.check("every piece had its checksum", wrong == 0, f"{wrong} of them had another one")

    @staticmethod
    def lines(record: dict[str, Any]) -> list[str]:
        rates = ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in record["setup"]["kv_rates"].items())
        lines = [f"KV to another process through shared memory; stages alone, GB/s: {rates}"]
        for tokens in record["setup"]["kv_tokens"]:
            e, rate = record["results"][f"transfer.{tokens}"], record["derived"][f"transfer.{tokens}.bytes_per_s"]
            expected = record["predictions"][f"transfer.{tokens}"]["prediction"]["expected"]
            lines.append(
                f"  {tokens:>5} tokens: {seconds(e['median'])} (p10 {seconds(e['p10'])}, p90 {seconds(e['p90'])}), "
                f"predicted {seconds(expected)}; {rate['median'] / 1e9:.2f} GB/s"
            )
        return lines
