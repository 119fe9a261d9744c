"""What it costs that ranks speak to each other: a + 2 (N - 1) / N * bytes / bandwidth. Lesson 14 builds this.

The ring all-reduce (Patarasuk and Yuan, 2009) sends 2 (N - 1) / N of the tensor from every rank, whatever N is, in
2 (N - 1) messages one after the other. So a = start + 2 (N - 1) hop is latency, which no link makes smaller by being
wide, and the rest is bandwidth. A decode step's tensors are small: it pays a. A prefill's are large: it pays bytes.

`LINKS` has the bandwidths of datasheets, as leads. `measure` times real processes here, `fit` finds start and bandwidth
in some sizes, and `judge` says how far they are off on sizes that the fit has not seen.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minillm.errors import MinillmError

if TYPE_CHECKING:
    from minillm.parallel.group import Group

GB = 1e9
Sample = tuple[int, int, float]  # bytes of the tensor, ranks, seconds of one all-reduce


@dataclass(frozen=True)
class Link:
    """What joins devices: a ring over it. Other algorithms start slower or faster, and move as much.

    bandwidth  bytes/s that a device sends while it receives as much
    start      seconds that a collective costs before anything moves
    hop        seconds of each message after another
    """

    name: str
    bandwidth: float
    start: float = 0.0
    hop: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for name, least in (("bandwidth", 1e-300), ("start", 0.0), ("hop", 0.0)):
            v = getattr(self, name)
            if isinstance(v, bool) or not isinstance(v, int | float) or not least <= v < math.inf:
                kind = "above 0 bytes/s" if name == "bandwidth" else "of at least 0 s"
                raise MinillmError(f"link {self.name!r}: {name} is a finite number {kind}, got {v!r:.80}")

    def latency(self, ranks: int) -> float:
        """a of an all-reduce: seconds of one without content."""
        return self.start + 2 * (ranks - 1) * self.hop if _ranks(ranks) > 1 else 0.0

    def all_reduce(self, nbytes: float, ranks: int) -> float:
        """Seconds to sum a tensor of `nbytes` bytes over `ranks` ranks, all of which get the sum."""
        return self.latency(ranks) + 2 * (ranks - 1) / ranks * _bytes(nbytes) / self.bandwidth

    def all_gather(self, nbytes: float, ranks: int) -> float:
        """Seconds until every rank has the `nbytes` bytes of every other one."""
        if _ranks(ranks) == 1:
            return 0.0
        return self.start + (ranks - 1) * (self.hop + _bytes(nbytes) / self.bandwidth)

    def send(self, nbytes: float) -> float:
        """Seconds until one rank has the `nbytes` bytes of another."""
        return self.start + self.hop + _bytes(nbytes) / self.bandwidth

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _bytes(nbytes: float) -> float:
    if not 0 <= nbytes < math.inf:
        raise MinillmError(f"a tensor has 0 bytes or more, got {nbytes!r:.80}")
    return nbytes


def _ranks(ranks: int) -> int:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise MinillmError(f"ranks must be a whole number, at least 1, got {ranks!r:.80}")
    return ranks


def _nccl(name: str, gigabytes: float, hop_us: float, source: str) -> Link:
    return Link(name, gigabytes * GB, 6.6e-6, hop_us * 1e-6, source)


# Bandwidth: one direction of one device, by datasheet. start and hop: as NCCL's own model of cost has them for a ring
# with its low-latency protocol (src/graph/tuning.cc): 6.6 us, and a message 0.6 us over NVLink, 1.0 over PCIe, 2.7 over
# RDMA. That protocol moves less than the bandwidth here, so both together are optimistic, as peaks are. Ethernet is
# taken with the kernel's TCP: 15 us a pass through a stack, two a message (Rumble et al., HotOS 2011, table 1).
LINKS: dict[str, Link] = {
    "nvlink4": _nccl("NVLink 4 through NVSwitch", 450, 0.6, "NVIDIA H100 and H200 SXM datasheets: 900 GB/s, two ways"),
    "nvlink5": _nccl("NVLink 5 through NVSwitch", 900, 0.6, "NVIDIA Blackwell architecture brief: 1.8 TB/s, two ways"),
    "nvlink3": _nccl("NVLink 3 through NVSwitch", 300, 0.6, "NVIDIA A100 SXM datasheet: 600 GB/s, two ways"),
    "pcie5": _nccl("PCIe 5.0 x16", 63, 1.0, "PCI Express 5.0: 16 lanes of 32 GT/s, 128b/130b"),
    "pcie4": _nccl("PCIe 4.0 x16", 31.5, 1.0, "PCI Express 4.0: 16 lanes of 16 GT/s, 128b/130b"),
    "ib400": _nccl("InfiniBand NDR, 400 Gb/s a device", 50, 2.7, "NVIDIA ConnectX-7 datasheet: 400 Gb/s"),
    "eth100": _nccl("Ethernet, 100 Gb/s, TCP", 12.5, 30.0, "IEEE 802.3ba; latency of the kernel's TCP"),
    "eth25": _nccl("Ethernet, 25 Gb/s, TCP", 3.125, 30.0, "IEEE 802.3by; latency of the kernel's TCP"),
}
# The link that a device of device.DATASHEET has to its neighbours in one node.
OF_DEVICE = {"a100": "nvlink3", "h100": "nvlink4", "h200": "nvlink4", "b200": "nvlink5", "l4": "pcie4",
             "rtx-4090": "pcie4"}  # fmt: skip


def link(name: str) -> Link:
    """A link of the table by its short name. Raises MinillmError with the names there are."""
    key = str(name).lower()
    if key not in LINKS:
        raise MinillmError(f"link {name!r} is not known; use one of {', '.join(LINKS)}")
    return LINKS[key]


def fit(samples: Sequence[Sample], name: str = "fitted") -> Link:
    """start, hop and bandwidth by non-negative least squares of the relative error.

    With one number of ranks start and hop cannot be told apart: start is then all of a, and the link holds for that
    number of ranks. Raises MinillmError where the samples do not show a bandwidth.
    """
    if any(n < 1 or _ranks(r) < 2 or not 0 < s < math.inf for n, r, s in samples):
        raise MinillmError("a fit needs samples (bytes >= 1, ranks >= 2, seconds > 0)")
    several = len({r for _, r, _ in samples}) > 1
    if len({n for n, _, _ in samples}) < 2 or len(samples) < 2 + several:
        raise MinillmError(f"a fit needs at least {2 + several} samples and two sizes, got {len(samples)}")
    columns = [[1.0, 2.0 * (r - 1) if several else 0.0, 2 * (r - 1) / r * n] for n, r, _ in samples]
    raw = np.array(columns) / np.array([s for *_, s in samples])[:, None]
    scale = np.maximum(np.linalg.norm(raw, axis=0), 1e-300)  # bytes and ones differ by many powers of ten
    x, one = raw / scale, np.ones(len(samples))
    best, least = np.zeros(3), math.inf
    for used in itertools.product((False, True), (False, several), (True,)):
        found, mask = np.zeros(3), list(used)
        found[mask] = np.linalg.lstsq(x[:, mask], one, rcond=None)[0]
        error = float(((x @ found - 1) ** 2).sum())
        if found.min() >= 0 and found[2] > 0 and error < least:
            best, least = found / scale, error
    if least == math.inf:
        raise MinillmError("these samples show no bandwidth: larger tensors did not take longer; add larger sizes")
    start, hop, per_byte = best.tolist()
    return Link(name, 1 / per_byte, start, hop, "measured")


def errors(model: Link, samples: Iterable[Sample]) -> list[float]:
    """|predicted - measured| / measured of each all-reduce."""
    return [abs(model.all_reduce(n, r) - s) / s for n, r, s in samples]


@dataclass(frozen=True)
class Judgement:
    """A fit, and its relative errors on sizes it has seen and on sizes it has not (`held_out`)."""

    link: Link
    seen: tuple[float, ...]
    held_out: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """Of the sizes that the fit has not seen."""
        return statistics.median(self.held_out)


def judge(samples: Sequence[Sample], name: str = "fitted") -> Judgement:
    """Fit every other size, the smallest first, and judge on those between."""
    sizes = sorted({n for n, _, _ in samples})
    if len(sizes) < 4:
        raise MinillmError(f"a fit judged on other sizes needs at least four sizes, got {len(sizes)}")
    known = set(sizes[::2])
    seen, other = [s for s in samples if s[0] in known], [s for s in samples if s[0] not in known]
    found = fit(seen, name)
    return Judgement(found, tuple(errors(found, seen)), tuple(errors(found, other)))


# 4 kB to 1 MB: what a rank of the course's model has to sum in a step of 1 to 512 tokens. Larger tensors leave the
# caches of a CPU and are slower a byte; that is another line.
SIZES = tuple(4096 * 2**i for i in range(9))


CALLS = 10  # all-reduces in a row that are timed together


def measure(
    ranks: int = 2, sizes: Sequence[int] = SIZES, repeats: int = 30, *, backend: str = "gloo", timeout_s: float = 600.0
) -> list[Sample]:
    """Seconds of an all-reduce of fp32 tensors of these bytes between real processes of this machine: medians.

    repeats: rounds of `timed`. A round's time is that of the slowest rank. Raises RankLost when a process fails.
    """
    from minillm.parallel.processes import run_processes

    if _ranks(ranks) < 2 or not sizes or min(sizes) < 4 or repeats < 1:
        raise MinillmError("measuring needs ranks >= 2, sizes of at least 4 bytes, and repeats >= 1")
    arguments = {"sizes": list(sizes), "rounds": repeats, "cuda": backend == "nccl"}
    by_rank = run_processes(ranks, "minillm.roofline.comm:timed", arguments, backend=backend, timeout_s=timeout_s)
    slowest = np.array(by_rank).max(axis=0)  # [rounds, sizes]
    return [(4 * (n // 4), ranks, float(s)) for n, s in zip(sizes, np.median(slowest, axis=0), strict=True)]


def timed(group: Group, sizes: Sequence[int], rounds: int, cuda: bool = False) -> list[list[float]]:
    """Work of one rank: seconds of an all-reduce, [rounds, sizes]; each the mean of CALLS in a row.

    In a row, as a step makes them and as the benchmarks of MPI and NCCL do. On a CPU one call in several waits for its
    turn on a core, for milliseconds: a step pays that, and the median of single calls would leave it out, or jump where
    it is about half of them. Every size is timed once a round, so that a busy moment does not fall on one of them.
    """
    import torch

    device = f"cuda:{torch.cuda.current_device()}" if cuda else "cpu"
    tensors = [torch.zeros(n // 4, device=device) for n in sizes]
    found = [[per_call(lambda x=x: group.all_reduce(x), cuda) for x in tensors] for _ in range(rounds + 1)]  # type: ignore[misc]
    return found[1:]  # the first opens connections and touches memory


def per_call(run: Callable[[], Any], cuda: bool) -> float:
    """Seconds of one of CALLS calls in a row."""
    import torch

    wait = torch.cuda.synchronize if cuda else lambda: None
    wait()
    begun = time.perf_counter()
    for _ in range(CALLS):
        run()
    wait()
    return (time.perf_counter() - begun) / CALLS


def in_turns(link: Link, samples: Sequence[Sample]) -> Link:
    """The same wires for more ranks than cores: a message waits until its receiver has a core, and a byte does not.

    samples: of one number of ranks, which have to share the cores. All of a is then in hop.
    """
    if len({r for _, r, _ in samples}) != 1:
        raise MinillmError("ranks that take turns are as many in all samples: how long they wait depends on it")
    ranks = samples[0][1]
    waits = [s - 2 * (ranks - 1) / ranks * n / link.bandwidth for n, _, s in samples]
    hop = max(0.0, statistics.median(waits)) / (2 * (ranks - 1))
    return Link(f"{link.name}, {ranks} ranks in turns", link.bandwidth, 0.0, hop, "measured")
