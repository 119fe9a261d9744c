"""The ceilings of one machine: FLOP/s, bytes/s, seconds a call. Lesson 00 builds this.

A roofline (Williams, Waterman, Patterson, 2009) needs two numbers of a machine: how many FLOPs it
can do in a second and how many bytes it can move. `device("h200")` takes them from a datasheet, as a
lead; `this_machine()` measures them here and remembers them under the machine's identity.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from bisect import bisect_left
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from minillm.config import dtype_name
from minillm.errors import MinillmError
from minillm.paths import cache_dir

CEILINGS_SCHEMA = 1
GB = 1e9
_TRIED: set[Path] = set()  # what this process has measured


@dataclass(frozen=True)
class Device:
    """What a machine can do at most. Rates in FLOP/s and bytes/s, times in seconds, sizes in bytes.

    A copy of n bytes moves 2n (read and write), a triad 3n, a gather 2n. `gemm` holds, by dtype and
    row count, the rate that the best GEMM of the library reached on weights streamed from memory: empty
    for a datasheet. `call_overhead` is what one operator call costs before it does any work; a datasheet
    does not name it, so it is 0 there and every prediction from a datasheet is an optimistic one.
    """

    name: str
    kind: str  # "cpu" or "cuda"
    peak_flops: dict[str, float]
    read_bandwidth: float
    copy_bandwidth: float
    triad_bandwidth: float
    gather_bandwidth: float
    memory_bytes: int
    call_overhead: float = 0.0
    link_bandwidth: float | None = None  # bytes/s in one direction
    link_latency: float | None = None
    source: str = "datasheet"  # or "measured"
    identity: dict[str, Any] = field(default_factory=dict)
    gemm: dict[str, dict[int, float]] = field(default_factory=dict)
    spread: dict[str, dict[str, float]] = field(default_factory=dict)  # median, p10, p90, best of each probe

    def __post_init__(self) -> None:
        rates = ("read_bandwidth", "copy_bandwidth", "triad_bandwidth", "gather_bandwidth", "memory_bytes")
        peaks = {f"peak {dtype}": value for dtype, value in self.peak_flops.items()}
        for name, value in ({n: getattr(self, n) for n in rates} | peaks).items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise MinillmError(f"device {self.name!r}: {name} must be a positive number, got {value!r}")
        if not (math.isfinite(self.call_overhead) and self.call_overhead >= 0):
            raise MinillmError(f"device {self.name!r}: call_overhead must be at least 0 s, got {self.call_overhead!r}")
        rows = {d: {int(r): v for r, v in sorted(t.items(), key=lambda x: int(x[0]))} for d, t in self.gemm.items()}
        object.__setattr__(self, "gemm", rows)  # JSON turns whole-number keys into strings

    def peak(self, dtype: str) -> float:
        """FLOP/s of dense matrix products in this dtype."""
        name = dtype_name(dtype)
        if name not in self.peak_flops:
            raise MinillmError(f"{self.name} has no peak for {name}; it has {', '.join(self.peak_flops)}")
        return self.peak_flops[name]

    def gemm_rate(self, dtype: str, rows: int) -> float:
        """FLOP/s of a matrix product with so many rows: between two measured counts, straight in log-log.

        Outside the measured counts: in proportion to the rows below (a weight is read once, whatever the
        rows), the rate of the largest above. Without measurements it is the peak.
        """
        table = self.gemm.get(dtype_name(dtype))
        if not table:
            return self.peak(dtype)
        counts = list(table)
        if rows <= counts[0]:
            return table[counts[0]] * rows / counts[0]
        if rows >= counts[-1]:
            return table[counts[-1]]
        i = bisect_left(counts, rows)
        low, high = counts[i - 1], counts[i]
        share = math.log(rows / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(table[low]) + share * math.log(table[high]))

    @property
    def busy(self) -> bool:
        """Measured while others used the cores: these ceilings are too low and should be measured again."""
        return self.processor_share < 0.85

    @property
    def processor_share(self) -> float:
        """Part of its threads' time that the measuring process had: 1 alone."""
        return self.spread.get("processor share", {"median": 1.0})["median"]

    @property
    def roof_bandwidth(self) -> float:
        """The fastest this memory was seen to move bytes in any pattern: no operator can beat it."""
        return max(self.read_bandwidth, self.copy_bandwidth, self.triad_bandwidth, self.gather_bandwidth)

    def bandwidth(self, kind: str) -> float:
        """bytes/s for a kind of operator: products stream (read), elementwise work copies, look-ups gather."""
        return {"elementwise": self.copy_bandwidth, "gather": self.gather_bandwidth}.get(kind, self.read_bandwidth)

    def ridge(self, dtype: str) -> float:
        """FLOPs a byte where memory stops being the limit (the knee of the roofline)."""
        return self.peak(dtype) / self.roof_bandwidth

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Device:
        known = {f.name for f in fields(cls)}
        try:
            return cls(**{k: v for k, v in data.items() if k in known})
        except (TypeError, AttributeError, ValueError) as error:
            raise MinillmError(f"these ceilings do not describe a device ({error}); measure them again") from None


def _sheet(name: str, bf16: float, fp32: float, bandwidth: float, memory: float, link: float) -> Device:
    """Datasheet entry. TFLOP/s, GB/s, GB as printed there; link in GB/s for one direction."""
    return Device(
        name=name, kind="cuda",
        peak_flops={"float32": fp32 * 1e12, "bfloat16": bf16 * 1e12, "float16": bf16 * 1e12},
        read_bandwidth=bandwidth * GB, copy_bandwidth=bandwidth * GB, triad_bandwidth=bandwidth * GB,
        gather_bandwidth=bandwidth * GB, memory_bytes=int(memory * GB), link_bandwidth=link * GB,
        identity={"datasheet": name},
    )  # fmt: skip


# Dense peaks: where a sheet prints "with sparsity", half of it. fp32 is the plain (not TF32) rate. fp16 and bf16 with
# fp32 accumulation. Links are one direction, half of the "bidirectional" number that the sheets print.
DATASHEET: dict[str, Device] = {
    # NVIDIA A100 80GB SXM datasheet (2021): 312 TF bf16, 19.5 TF fp32, 2,039 GB/s, NVLink 600 GB/s.
    "a100": _sheet("NVIDIA A100 SXM 80GB", 312, 19.5, 2039, 80, 300),
    # NVIDIA H100 SXM datasheet (2023): 1,979 TF bf16 sparse, 67 TF fp32, 3.35 TB/s, NVLink 900 GB/s.
    "h100": _sheet("NVIDIA H100 SXM", 989.5, 67, 3350, 80, 450),
    # NVIDIA H200 SXM datasheet (2024): H100's arithmetic, 141 GB at 4.8 TB/s, NVLink 900 GB/s.
    "h200": _sheet("NVIDIA H200 SXM", 989.5, 67, 4800, 141, 450),
    # NVIDIA Blackwell architecture brief (2024), HGX B200 at 1,000 W: 4.5 PF bf16 sparse, 80 TF fp32, 8 TB/s,
    # NVLink 1.8 TB/s; 180 GB of its 192 GB are usable (DGX B200 datasheet: 1,440 GB for eight).
    "b200": _sheet("NVIDIA B200 SXM", 2250, 80, 8000, 180, 900),
    # NVIDIA L4 datasheet (2023): 242 TF bf16 sparse, 30.3 TF fp32, 300 GB/s, 24 GB, PCIe 4.0 x16 64 GB/s.
    "l4": _sheet("NVIDIA L4", 121, 30.3, 300, 24, 32),
    # NVIDIA Ada architecture whitepaper (2023), appendix A: 165.2 TF fp16/bf16 with fp32 accumulate, 82.6 TF fp32,
    # 1,008 GB/s, 24 GB; PCIe 4.0 x16, no NVLink.
    "rtx-4090": _sheet("NVIDIA GeForce RTX 4090", 165.2, 82.6, 1008, 24, 32),
    # AMD Instinct MI300X data sheet (2023): 1,307.4 TF bf16, 163.4 TF fp32, 5.3 TB/s, 192 GB, and seven Infinity
    # Fabric links of 128 GB/s: one peer is reached over one link.
    "mi300x": _sheet("AMD Instinct MI300X", 1307.4, 163.4, 5300, 192, 64),
}


def device(name: str) -> Device:
    """A known device by its datasheet, or "here"/"cpu"/"cuda": this machine, measured."""
    if name in ("here", "auto", "cpu", "cuda") or name.startswith("cuda:"):
        return this_machine("auto" if name in ("here", "auto") else name)
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key not in DATASHEET:
        known = ", ".join(DATASHEET)
        raise MinillmError(f"device {name!r} is not known; use one of {known}, or cpu or cuda for this machine")
    return DATASHEET[key]


def _cache_file(identity: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / f"ceilings-{digest}.json"


def cached_machine(where: str = "auto") -> Device | None:
    """The ceilings of this machine if they were measured before, else None. Measures nothing."""
    from minillm.device import pick_device
    from minillm.roofline import measure

    return _cached(measure.identity(str(pick_device(where))))


def _cached(identity: dict[str, Any]) -> Device | None:
    try:
        saved = json.loads(_cache_file(identity).read_text(encoding="utf-8"))
        if saved["schema"] == CEILINGS_SCHEMA and saved["device"]["identity"] == identity:
            return Device.from_dict(saved["device"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent, broken or of another schema: as if never measured
    return None


def this_machine(where: str = "auto", *, remeasure: bool = False) -> Device:
    """The measured ceilings of this machine; about 10 s the first time, then from the user cache.

    The cache is keyed by identity: processor or GPU, cores, threads in use, torch version, driver.
    Another one of these measures again, and so does `remeasure=True`. Ceilings of a busy machine are measured once more
    by each process that asks, until it was idle; the better ones stay.
    """
    from minillm.device import pick_device
    from minillm.roofline import measure

    kind = str(pick_device(where))
    identity = measure.identity(kind)
    path = _cache_file(identity)
    known = None if remeasure else _cached(identity)
    if known is not None and (not known.busy or path in _TRIED):
        return known
    _TRIED.add(path)
    found = measure.measure(kind)
    if known is not None and found.processor_share < known.processor_share:
        return known
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps({"schema": CEILINGS_SCHEMA, "device": found.to_dict()}, indent=1), encoding="utf-8")
    partial.replace(path)  # whole or not at all, also when interrupted
    return found
