"""Measures the ceilings of the machine it runs on. Lesson 00 builds the idea; this file is the careful version.

Bandwidth: stream over far more bytes than the last cache holds and keep the best of several ways and
sizes, since a ceiling that something later exceeds is no ceiling. Arithmetic: matrix products on random
data, large squares for the peak, the linears of a model over streamed weights for what a step can get.
Overhead: an operator on one row, which does nothing but be called.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minillm.device import pick_device
from minillm.models.linear import Linear, can_pack
from minillm.roofline.device import Device
from minillm.roofline.stats import summary

ROWS = (1, 8, 32, 128, 512)
# (in, out) of q/k/v, o, gate/up, down: the embedded model on a CPU, an 8 B Llama on a GPU.
SHAPES = {
    "cpu": ((576, 960), (576, 576), (576, 3072), (1536, 576)),
    "cuda": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
}
PAGE_BYTES = 4096  # one page of the gather: 16 tokens of 2 KV heads of 64 in bf16


def identity(where: str) -> dict[str, Any]:
    """What these ceilings belong to. Another value of any of these means measuring again."""
    known: dict[str, Any] = {"torch": torch.__version__, "system": platform.system(), "machine": platform.machine()}
    if where == "cpu":
        return known | {"cpu": cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    gpu = torch.cuda.get_device_properties(where)
    driver = gpu_state().get("driver_version", "unknown")
    return known | {"gpu": gpu.name, "sm": gpu.multi_processor_count, "driver": driver}


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            info = dict(p for line in lines if len(p := [s.strip() for s in line.split(":", 1)]) == 2 and p[1])
    except OSError:
        info = {}
    name = info.get("model name") or platform.processor() or platform.machine()
    codes = "/".join(info[k] for k in ("cpu family", "model", "stepping") if k in info)
    return f"{name} ({codes})" if codes else name


def last_cache_bytes() -> int:
    """Size of the largest processor cache; 32 MiB where the system does not say."""
    best = 0
    for i in range(5):
        try:
            with open(f"/sys/devices/system/cpu/cpu0/cache/index{i}/size", encoding="utf-8") as file:
                text = file.read().strip()
            best = max(best, int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]])
        except (OSError, ValueError, KeyError):
            continue
    return best or 32 << 20


def gpu_state() -> dict[str, str]:
    """Driver, clocks, power limit and temperature of the first GPU by nvidia-smi; empty where there is none."""
    keys = "uuid,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={keys}", "--format=csv,noheader"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = out.stdout.strip().splitlines()
    if out.returncode or not lines:
        return {}
    return dict(zip(keys.split(","), (v.strip() for v in lines[0].split(","))))


def cpu_state() -> dict[str, Any]:
    """Clocks in MHz, and how many processes wanted to run in the last minute: what else the machine was doing."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
        return {"clocks_mhz": clocks, "load": os.getloadavg()[0]}
    except (OSError, ValueError, IndexError):
        return {}


def seconds(run: Callable[[], Any], where: str, repeats: int, warmup: int = 2, budget: float = 0.5) -> list[float]:
    """Wall time of each call on a CPU, event time on a GPU. Every sample is kept.

    On a CPU that is busy with something else no more are taken once `budget` seconds are spent (at least two).
    """
    for _ in range(warmup):
        run()
    if where == "cpu":
        samples: list[float] = []
        while len(samples) < repeats and (len(samples) < 2 or sum(samples) < budget):
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
        return samples
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def bandwidths(where: str, megabytes: int | None = None, repeats: int = 8) -> dict[str, list[float]]:
    """bytes/s of read, copy, triad and page gather: samples over two sizes beyond the last cache."""
    if megabytes is None:
        megabytes = min(max(256, 8 * last_cache_bytes() >> 20), 512) if where == "cpu" else 2048
    found: dict[str, list[float]] = {"read": [], "copy": [], "triad": [], "gather": []}
    for size in (megabytes, 2 * megabytes):
        n = size * (1 << 20) // 4
        a, b, c = (torch.ones(n, device=where) for _ in range(3))  # written once: no untouched zero page is read
        pages, target = a.view(-1, PAGE_BYTES // 4), b.view(-1, PAGE_BYTES // 4)
        order = torch.randperm(len(pages), device=where)
        probes: list[tuple[str, int, Callable[[], Any]]] = [
            ("read", 1, partial(torch.sum, a)),
            ("read", 1, partial(torch.amax, a)),
            ("read", 1, partial(torch.dot, a, a)),
            ("copy", 2, partial(b.copy_, a)),
            ("triad", 3, partial(torch.add, a, b, alpha=3.0, out=c)),
            ("gather", 2, partial(torch.index_select, pages, 0, order, out=target)),
        ]
        for name, moved, run in probes:
            found[name] += [moved * a.nbytes / s for s in seconds(run, where, repeats)]
    return found


def gemm_rates(
    where: str, dtype: torch.dtype, shapes: tuple[tuple[int, int], ...], stream_bytes: int, repeats: int = 3
) -> dict[int, float]:
    """FLOP/s of a model's linears by row count, each weight read from memory as in a real step.

    Enough layers are made that the weights exceed `stream_bytes`; with many rows, where arithmetic is the
    limit, fewer of them do. On a CPU the better of the plain and the packed form counts: an engine may use either.
    """
    layer = sum(i * o for i, o in shapes)
    layers = max(1, round(stream_bytes / (layer * torch.empty((), dtype=dtype).element_size())))
    weights = [torch.randn(o, i, device=where).to(dtype) for _ in range(layers) for i, o in shapes]
    forms = [[Linear(w) for w in weights]]
    if where == "cpu" and can_pack(weights[0]):
        forms.append([Linear(w).pack() for w in weights])
    rates: dict[int, float] = {}
    for rows in ROWS:
        inputs = {i: torch.randn(rows, i, device=where).to(dtype) for i, _ in shapes}
        used = layers if where != "cpu" else max(1, min(layers, round(16e9 / (2 * rows * layer))))

        def step(form: list[Linear], inputs: dict[int, torch.Tensor] = inputs, used: int = used) -> None:
            for product in form[: used * len(shapes)]:
                product(inputs[product.in_features])

        best = min(min(seconds(partial(step, form), where, repeats, warmup=1)) for form in forms)
        rates[rows] = 2 * rows * used * layer / best
    return rates


def peak_flops(where: str, dtype: torch.dtype, sizes: tuple[int, ...], repeats: int = 4) -> list[float]:
    """FLOP/s of square products of these sizes on random data."""
    found = []
    for n in sizes:
        a, b = (torch.randn(n, n, device=where).to(dtype) for _ in range(2))
        found += [2 * n**3 / s for s in seconds(partial(torch.matmul, a, b), where, repeats, warmup=1)]
    return found


def processor_share(threads: int) -> float:
    """Part of its threads' time that a large product really ran: 1 alone, less when others use the cores too."""
    a, b = (torch.ones(1536, 1536) for _ in range(2))
    wall, busy = time.perf_counter(), time.process_time()
    for _ in range(8):
        torch.matmul(a, b)
    return (time.process_time() - busy) / (time.perf_counter() - wall) / threads


def call_overhead(where: str, calls: int = 300, repeats: int = 7) -> list[float]:
    """Seconds a call of operators on one small row: the median over four common ones, each repeat a sample."""
    x, y = torch.ones(1, 64, device=where), torch.ones(1, 64, device=where)
    w = torch.ones(64, 64, device=where)
    operators = (lambda: x + y, lambda: x * y, lambda: F.linear(x, w), lambda: x.mean(-1, keepdim=True))
    samples = []
    for _ in range(repeats):
        each = []
        for run in operators:
            if where != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            if where != "cpu":
                torch.cuda.synchronize()
            each.append((time.perf_counter() - start) / calls)
        samples.append(statistics.median(each))
    return samples


@torch.inference_mode()
def measure(where: str) -> Device:
    """All ceilings: under 15 s on two cores. The caller's random state is left as it was."""
    where = str(pick_device(where))
    cpu = where == "cpu"
    gemm: dict[str, dict[int, float]] = {}
    peaks: dict[str, float] = {}
    with torch.random.fork_rng(devices=[] if cpu else [torch.device(where)]):
        torch.manual_seed(0)
        shares = [processor_share(torch.get_num_threads())] if cpu else []
        moved = bandwidths(where)
        spread = {name: summary(samples) for name, samples in moved.items()}
        overhead = summary(call_overhead(where))
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            large = peak_flops(where, dtype, (1024, 2048) if cpu else (4096, 8192))
            gemm[name] = gemm_rates(where, dtype, SHAPES["cpu" if cpu else "cuda"], (256 if cpu else 1024) << 20)
            peaks[name] = max(large + list(gemm[name].values()))
            spread[f"peak {name}"] = summary(large)
        if cpu:
            shares += [processor_share(torch.get_num_threads()) for _ in range(2)]
            spread["processor share"] = summary(shares)
        # fp16: the tensor cores of a GPU run it at bf16's rate; many CPUs emulate it, so a small product must do.
        half = peak_flops(where, torch.float16, (512,) if cpu else (4096, 8192), 3)
        spread["peak float16"] = summary(half)
        peaks["float16"] = max(half)
    if cpu:
        memory, title = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), cpu_model()
    else:
        gpu = torch.cuda.get_device_properties(where)
        memory, title = gpu.total_memory, gpu.name
    best = {name: values["max"] for name, values in spread.items()}
    return Device(
        name=title, kind="cpu" if cpu else "cuda", peak_flops=peaks, read_bandwidth=best["read"],
        copy_bandwidth=best["copy"], triad_bandwidth=best["triad"], gather_bandwidth=best["gather"],
        memory_bytes=memory, call_overhead=overhead["median"], source="measured", identity=identity(where), gemm=gemm,
        spread=spread | {"call_overhead": overhead},
    )  # fmt: skip
