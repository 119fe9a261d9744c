"""Copy a KV cache back or compute it again: which is predicted to be cheaper. Lesson 12 builds it.

Copying costs what its bytes cost, in proportion to the tokens. Computing costs at least a read of the weights for each
chunk, then arithmetic in proportion to the tokens, then attention in proportion to their square. So where the lines
cross depends on the link, the model and the length, and a rule of thumb is wrong somewhere.

    recompute   T(kept tokens + tail)          swap   write out + read back + T(tail)

The tail are tokens that must be computed either way: the partial last block, and at least the last token of a prompt.
It matters: on a machine bound by reading weights, a few more tokens beside it are nearly free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from minillm.config import ModelConfig, dtype_name
from minillm.errors import MinillmError
from minillm.roofline.device import DATASHEET, Device, cached_machine
from minillm.roofline.predict import predict_step

# What is assumed of links until they were used. All are on the fast side: a tier that looks too slow is not used, so
# it is never measured, while one that looks too fast is measured at its first use. The host behind a GPU: one way of
# PCIe 4.0 x16. A disk: an NVMe drive on four lanes of PCIe 3.0. Latencies are those of a block: some calls, a file.
HOST_LINK, HOST_LATENCY = 32e9, 1e-5
DISK_RATE, DISK_LATENCY = 3e9, 1e-4
WINDOW, PRIOR = 9, 3  # observations that a rate remembers; how many of them the prediction counts for at the start
REFUSALS = 100  # in a row, after which a rate counts as unknown

# When nothing is known: a small machine, so that keeping blocks looks worth a try.
UNKNOWN = {
    "cpu": Device(
        name="a small CPU", kind="cpu", peak_flops={"float32": 1e11, "bfloat16": 1e11, "float16": 1e11},
        read_bandwidth=1e10, copy_bandwidth=1e10, triad_bandwidth=1e10, gather_bandwidth=1e10, memory_bytes=8 << 30,
        call_overhead=5e-6, source="default",
    ),
    "cuda": replace(DATASHEET["l4"], name="a small GPU", source="default"),
}  # fmt: skip


def recompute_seconds(
    config: ModelConfig, tokens: int, device: Device, dtype: str = "bfloat16", *, context_before: int = 0,
    chunk: int = 512, **how: Any,
) -> float:  # fmt: skip
    """Seconds to compute so many tokens of one sequence after a context, in steps of `chunk`. `how`: see cost.step."""
    rows = _chunks(tokens, context_before, chunk)
    return sum(predict_step(config, [row], device, dtype, **how).expected for row in rows)


def _chunks(tokens: int, context: int, chunk: int) -> list[tuple[int, int]]:
    if tokens < 0 or context < 0 or chunk < 1:
        raise MinillmError(f"tokens and context must be at least 0, a chunk 1, got {tokens}, {context} and {chunk}")
    return [(min(chunk, tokens - done), context + done) for done in range(0, tokens, chunk)]


def restore_seconds(nbytes: float, bandwidth: float, latency: float = 0.0) -> float:
    """Seconds of one copy: latency + bytes / bandwidth (bytes/s)."""
    if not (nbytes >= 0 and bandwidth > 0 and latency >= 0):
        raise MinillmError(
            f"a copy needs bytes, a bandwidth above 0 and a latency, got {nbytes}, {bandwidth}, {latency}"
        )
    return latency + nbytes / bandwidth


@dataclass(frozen=True)
class Choice:
    """how: "recompute" or "swap". terms: seconds of recompute, write, read and tail."""

    how: str
    recompute_s: float
    swap_s: float
    terms: dict[str, float]


def cheaper(recompute_s: float, *, read_s: float, write_s: float = 0.0, tail_s: float = 0.0) -> Choice:
    """The cheaper of computing all and of copying out, back, and computing the tail. A tie moves no bytes."""
    swap_s = write_s + read_s + tail_s
    terms = {"recompute": recompute_s, "write": write_s, "read": read_s, "tail": tail_s}
    return Choice("swap" if swap_s < recompute_s else "recompute", recompute_s, swap_s, terms)


class _Ratio:
    """Observed over predicted seconds: the median of the last observations, at first with the prediction among them.

    Four observations that agree move it all the way. One outlier moves it at most to its neighbour among the others,
    whatever its size, and two cannot move it at the start.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._seen = deque([1.0] * PRIOR, WINDOW)
        self._refused = 0

    @property
    def value(self) -> float:
        return median(self._seen)

    def observe(self, seconds: float, predicted: float) -> None:
        if math.isfinite(seconds) and seconds > 0:  # a clock may not have moved
            self._seen.append(seconds / predicted)
            self._refused = 0

    def refused(self) -> None:
        """It spoke against a copy. What is not used is not measured, so a bad hour must not last for ever."""
        self._refused += 1
        if self._refused >= REFUSALS:
            self._forget()


class RestoreModel:
    """Predicts both sides for one model on one machine, and corrects its rates by what the engine sees.

    A rate is a prediction times a `_Ratio`; there is one for computing, and one for each tier and direction. block_size
    in tokens, block_bytes over all layers. `source` says where the rates come from. Steps are predicted as if the
    request were alone in them, though it will share them with others: what that saves is in the observed ratio.
    """

    def __init__(
        self, config: ModelConfig, device: Device | None, *, dtype: str, block_size: int, block_bytes: int,
        chunk: int = 512, weights_as: str | None = None, kind: str = "cpu",
    ):  # fmt: skip
        """device: None takes a default for `kind`, "cpu" or "cuda"."""
        self.config, self.block_size, self.block_bytes, self.chunk = config, block_size, block_bytes, chunk
        self.device, self.dtype, self._weights_as = device or UNKNOWN[kind], dtype_name(dtype), weights_as
        self.source = {
            "measured": f"ceilings measured on {self.device.name}",
            "datasheet": f"the datasheet of {self.device.name}",
        }.get(
            self.device.source, f"a default, {self.device.name}, as nothing is known here; minillm doctor measures it"
        )
        peaks = self.device.peak_flops
        if self.dtype not in peaks:
            slowest = min(peaks, key=lambda d: peaks[d])
            self.device = replace(self.device, peak_flops=peaks | {self.dtype: peaks[slowest]})
            self.source += f"; {self.dtype} was not measured, {slowest} stands in"
        # A copy of n bytes moves 2 n through a CPU's memory.
        host = self.device.copy_bandwidth / 2 if self.device.kind == "cpu" else HOST_LINK
        self._links = {"host": (host, HOST_LATENCY), "disk": (DISK_RATE, DISK_LATENCY)}
        self._computing = _Ratio()
        self._copying = {(tier, write): _Ratio() for tier in self._links for write in (False, True)}
        self._steps: dict[tuple[int, int], float] = {}

    @classmethod
    def for_machine(cls, config: ModelConfig, where: str = "cpu", **how: Any) -> RestoreModel:
        """Ceilings of this machine if they were measured before, else a GPU's datasheet, else a default.

        Measures nothing. where: "cpu" or "cuda"; how: as for the class.
        """
        kind = "cpu" if where == "cpu" else "cuda"
        device = cached_machine(where)
        if device is None and kind == "cuda":
            device = datasheet_of(_gpu_name(where))
        return cls(config, device, kind=kind, **how)

    def recompute_seconds(self, tokens: int, context_before: int = 0) -> float:
        """Corrected seconds to compute so many tokens."""
        rows = _chunks(tokens, context_before, self.chunk)
        return self._computing.value * sum(map(self._step_seconds, rows))

    def copy_seconds(self, tier: str, blocks: int, *, write: bool) -> float:
        """Corrected seconds to copy so many blocks between the pool and a tier."""
        return self._ratio(tier, write).value * self._copy_seconds(tier, blocks)

    def preemption(self, blocks: int, *, stored: int = 0, tier: str = "host", tail: int = 1) -> Choice:
        """How to give up a request of so many full blocks, of which the tier has `stored` already."""
        if not 0 <= stored <= blocks:
            raise MinillmError(f"stored blocks are some of the request's, got {stored} of {blocks}")
        kept, tail = blocks * self.block_size, min(tail, self.chunk)
        choice = cheaper(
            self.recompute_seconds(kept + tail),
            write_s=self.copy_seconds(tier, blocks - stored, write=True),
            read_s=self.copy_seconds(tier, blocks, write=False),
            tail_s=self.recompute_seconds(tail, kept),
        )
        if blocks and choice.how == "recompute":
            for write in (False, True):
                self._ratio(tier, write).refused()
        return choice

    def restoring(self, tiers: Sequence[str], *, context_before: int = 0, tail: int = 1) -> tuple[int, Choice]:
        """How many blocks to read back, from the first, when block i is in tiers[i]; the rest is computed.

        Considered are none, all, and every change of tier. A tail of more than a chunk counts as one chunk: what
        comes after it is the same either way.
        """
        n, tail = len(tiers), min(tail, self.chunk)
        cuts = [0, *(i for i in range(1, n) if tiers[i] != tiers[i - 1]), n]
        options = []
        for k in dict.fromkeys(cuts):
            kept = k * self.block_size
            read = sum(self.copy_seconds(t, tiers[:k].count(t), write=False) for t in dict.fromkeys(tiers[:k]))
            rest = self.recompute_seconds((n - k) * self.block_size + tail, context_before + kept)
            options.append((read + rest, k, read, rest))
        _, count, read, rest = min(options)
        for tier in set(tiers[count:]):
            self._ratio(tier, False).refused()
        whole = options[0][0]
        if count == 0:  # beside it the best that reads anything
            _, _, read, rest = min(options[1:], default=options[0])
        return count, cheaper(whole, read_s=read, tail_s=rest)

    def worth_keeping(self, tier: str = "host", *, context_before: int = 0) -> bool:
        """Whether a block that leaves the pool after such a context should go to a tier.

        It will come back in a run, so it is judged as one of a chunk's blocks. Whether anybody will ask is not known.
        """
        start = context_before - context_before % self.chunk  # few different ones, whose steps are then known
        return self.restoring([tier] * max(1, self.chunk // self.block_size), context_before=start)[0] > 0

    def observe_prefill(self, tokens: int, seconds: float, context_before: int = 0) -> None:
        """A step computed so many tokens of one request. Times that are not above 0 are left out, here and below."""
        if tokens:
            self.observe_step([(tokens, context_before)], seconds)

    def observe_step(self, rows: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step of rows (new tokens, context before the step)."""
        predicted = predict_step(self.config, rows, self.device, self.dtype, weights_as=self._weights_as).expected
        self._computing.observe(seconds, predicted)

    def observe_copy(self, tier: str, blocks: int, seconds: float, *, write: bool) -> None:
        """So many blocks went from the pool to a tier (write) or came back, everything between included."""
        ratio = self._ratio(tier, write)
        if blocks:
            ratio.observe(seconds, self._copy_seconds(tier, blocks))

    def to_dict(self) -> dict[str, Any]:
        """Where the rates come from, and observed over predicted for each."""
        copying = {f"{'to' if w else 'from'} {tier}": ratio.value for (tier, w), ratio in self._copying.items()}
        return {"source": self.source, "ratios": {"computing": self._computing.value} | copying}

    def _ratio(self, tier: str, write: bool) -> _Ratio:
        if (tier, write) not in self._copying:
            raise MinillmError(f"tier {tier!r} is not known; use {' or '.join(self._links)}")
        return self._copying[tier, write]

    def _copy_seconds(self, tier: str, blocks: int) -> float:
        bandwidth, latency = self._links[tier]
        return restore_seconds(blocks * self.block_bytes, bandwidth, blocks * latency)

    def _step_seconds(self, row: tuple[int, int]) -> float:
        if row not in self._steps:
            if len(self._steps) >= 4096:  # each is asked for again soon, or never
                self._steps.clear()
            step = predict_step(self.config, [row], self.device, self.dtype, weights_as=self._weights_as)
            self._steps[row] = step.expected
        return self._steps[row]


def datasheet_of(name: str) -> Device | None:
    """The datasheet of a GPU by the name its driver gives, or None."""
    words = name.lower().replace("-", " ").split()
    return next((d for key, d in DATASHEET.items() if set(key.split("-")) <= set(words)), None)


def _gpu_name(where: str) -> str:
    import torch

    return torch.cuda.get_device_name(where)
