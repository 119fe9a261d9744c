"""Each Triton kernel against its roofline and against torch, on a CUDA card; on a CPU, checks and counts alone.

A CUDA graph runs a kernel on several sets of inputs, together larger than the last cache, so that each launch finds
the cache cold and none waits for Python. Ours and the peers take turns. Lessons 04 to 06 read the record.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minillm.bench.common import Options, ceilings, ceilings_after, progress, recorder, synchronize
from minillm.bench.kernel_cases import Case, cases
from minillm.device import on
from minillm.errors import MinillmError
from minillm.kernels import configs
from minillm.kernels.traffic import counted
from minillm.roofline import measure
from minillm.roofline.evidence import seconds, table_of

# Largest error allowed, relative to the largest entry of the float64 result. One rounding of bf16 is 0.004, of fp16
# 0.0005; attention rounds its probabilities as well. A dropped scale or a shifted mask is off by more than a tenth.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# What a kernel is for, as data: at least this share of what the card does beside it, or this rate.
GOALS = (
    {"key": "paged_decode.llama-3.1-8b.b32t4096.of_read", "what": "share of read bandwidth", "at_least": 0.85},
    {"key": "flash_prefill.llama-3.1-8b.n4096.flops", "what": "FLOP/s", "at_least": 400e12},
    {"key": "flash_prefill.llama-3.1-8b.n8192.flops", "what": "FLOP/s", "at_least": 400e12},
    {"key": "rms_norm.llama-3.1-8b.rows8192.of_copy", "what": "share of copy bandwidth", "at_least": 0.85},
    {"key": "add_rms_norm.llama-3.1-8b.rows8192.of_copy", "what": "share of copy bandwidth", "at_least": 0.85},
    {"key": "swiglu.llama-3.1-8b.rows8192.of_copy", "what": "share of copy bandwidth", "at_least": 0.85},
    {"key": "rope_kv.llama-3.1-8b.rows8192.of_copy", "what": "share of copy bandwidth", "at_least": 0.85},
    {"key": "fit_error", "what": "error of a fit on shapes it never saw", "at_most": 0.10},
)
ROTATE = 4  # sets of inputs hold at least so many times the last cache
SETS = 320  # at most


def run(options: Options) -> dict[str, Any]:
    """Check, predict, seal, measure. On a CPU: check and count, without a word on time."""
    options.model = "shapes of several models, random data"
    if options.on_cpu:
        return count(options)
    with on(torch.device(options.device)):
        return race(options)


# On a CPU -----------------------------------------------------------------------------------------------------------


def count(options: Options) -> dict[str, Any]:
    """The same cases, tiny, in the interpreter: right, and moving the bytes that the predictions for a GPU name."""
    book = recorder(options, ceilings(options))
    book.record["setup"] |= {"mode": "interpreter: correctness and counted bytes, no times", "goals": []}
    book.seal()
    for case in progress(list(cases(tiny=True)), "kernels"):
        for dtype in (torch.float32, torch.float16):
            verify_case(book, case, "cpu", dtype)
        inputs = case.make("cpu", torch.float16, options.seed)
        with counted() as traffic:
            inputs.run()
        for name, found, wanted in (
            ("read", traffic.unique_loaded, case.asked[0] if case.asked else case.read),
            ("written", traffic.unique_stored, case.asked[1] if case.asked else case.written),
        ):
            book.measured(f"{case.key}.{name}", [found], unit="bytes", analytic=wanted)
            detail = f"counted {found} bytes, analytic {wanted}"
            book.check(f"{case.key} {name}", abs(found - wanted) <= 0.02 * wanted, detail)
    return book.finish({})


def verify_case(book: Any, case: Case, device: str, dtype: torch.dtype, seed: int = 1) -> None:
    """Compare with the float64 reference. NaN and infinities count as wrong."""
    inputs = case.make(device, dtype, seed)
    worst = max(error(a, b) for a, b in zip(inputs.run(), inputs.reference()))
    limit, name = TOLERANCE[dtype], str(dtype).removeprefix("torch.")
    detail = f"largest error {worst:.1e} of the largest entry, allowed {limit:.1e}"
    book.check(f"{case.key} in {name}", worst <= limit, detail)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, wanted.to(got.dtype)) else float("inf")
    off = (got.double() - wanted.double()).abs()
    return float(off.max() / wanted.double().abs().max()) if bool(off.isfinite().all()) else float("inf")


# On a GPU -----------------------------------------------------------------------------------------------------------


def race(options: Options) -> dict[str, Any]:
    repeats = options.repeats or 9
    device = ceilings(options)
    todo = list(cases(tiny=False))
    book = recorder(options, device, repeats=repeats, goals=list(GOALS))
    book.record["setup"] |= {
        "mode": "CUDA graph", "timer": "CUDA events around a graph",
        "cache": f"cold: inputs rotate over at least {ROTATE} times the last cache",
    }  # fmt: skip
    for case in todo:
        book.predict_kernel(case.key, case.op, options.dtype)
    options.out(f"predictions sealed: sha256 {book.seal()}")
    for case in progress(todo, "kernels"):
        if case.read + case.written < 1 << 31:  # a float64 copy of the largest would not add anything
            for dtype in (torch.bfloat16, torch.float16):
                verify_case(book, case, options.device, dtype)
        samples = timed(case, options, repeats, book)
        book.measured(case.key, samples.pop("ours"))
        book.derive(f"{case.key}.share", "share", [case.key])
        book.derive(f"{case.key}.residual", "residual", [case.key])
        for peer, times in samples.items():
            book.measured(f"{case.key}.{peer}", times)
            book.derive(f"{case.key}.over_{peer}", "ratio", [f"{case.key}.{peer}", case.key])
        if case.goal in ("read", "copy"):
            probe = Bandwidths(options.device)
            book.measured(f"{case.key}.{case.goal}", probe.samples(case.goal, repeats), unit="bytes/s")
            book.derive(f"{case.key}.of_{case.goal}", "of_bandwidth", [case.key, f"{case.key}.{case.goal}"])
        if case.goal == "flops":
            book.derive(f"{case.key}.flops", "rate", [case.key], count=case.flops)
        torch.compiler.reset()  # it compiles one function for a few shapes only, then gives up
        torch.cuda.empty_cache()
    train, held_out = halves(todo)
    book.derive("fit_error", "fit_error", held_out, train=train)
    return book.finish(ceilings_after(options))


def halves(todo: list[Case]) -> tuple[list[str], list[str]]:
    """Keys to fit on and keys to judge by: every other shape of each kernel, so that each kernel is in the first."""
    by_kernel: dict[str, list[str]] = {}
    for case in todo:
        by_kernel.setdefault(case.kernel, []).append(case.key)
    return (
        [key for keys in by_kernel.values() for key in keys[::2]],
        [key for keys in by_kernel.values() for key in keys[1::2]],
    )


class Bandwidths:
    """Streaming reads and copies, in bytes/s, measured beside a kernel."""

    def __init__(self, device: str, megabytes: int = 1024):
        self.device = device
        self.source = torch.ones(megabytes * (1 << 20) // 4, device=device)
        self.target = torch.empty_like(self.source)

    def samples(self, what: str, repeats: int) -> list[float]:
        if what == "read":
            times = measure.seconds(lambda: torch.sum(self.source), self.device, repeats)
            return [self.source.nbytes / t for t in times]
        times = measure.seconds(lambda: self.target.copy_(self.source), self.device, repeats)
        return [2 * self.source.nbytes / t for t in times]


def timed(case: Case, options: Options, repeats: int, book: Any = None) -> dict[str, list[float]]:
    """Seconds of one launch by side: "ours", and each peer that can run this. Sides take turns."""
    cache = torch.cuda.get_device_properties(options.device).L2_cache_size
    sets = min(SETS, max(2, -(-ROTATE * cache // (case.read + case.written))))
    inputs = [case.make(options.device, options.torch_dtype, options.seed + i) for i in range(sets)]
    graphs = {"ours": Captured([x.run for x in inputs])}
    for peer in inputs[0].peers if book is not None else ():
        try:
            graphs[peer] = Captured([x.peers[peer] for x in inputs])
        except RuntimeError as fault:  # a backend that has no kernel for this shape: said, not hidden
            book.record["setup"].setdefault("peers_missing", {})[f"{case.key}.{peer}"] = str(fault).splitlines()[0][
                :200
            ]
            torch.cuda.synchronize(options.device)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(repeats + 1):
        for name in sorted(graphs, reverse=i % 2 == 1):
            spent = graphs[name].seconds() / sets
            if i:  # the first round only warms
                samples[name].append(spent)
    return samples


class Captured:
    """Launches recorded once as a CUDA graph. Outputs are kept, so that no two launches write the same memory."""

    def __init__(self, launches: list[Callable[[], Any]]):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compile, and let libraries make their plans, before the capture
            for launch in launches[:2]:
                launch()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = [launch() for launch in launches]
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(self) -> float:
        self.begin.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3


# Tuning -------------------------------------------------------------------------------------------------------------

SWEEP: dict[str, dict[str, tuple[int, ...]]] = {
    "rms_norm": {"num_warps": (2, 4, 8, 16)},
    "swiglu": {"BLOCK": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)},
    "rope_kv": {"BLOCK_HEADS": (4, 8, 16), "num_warps": (1, 2, 4)},
    "flash_prefill": {"BLOCK_M": (64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
    "paged_decode": {"BLOCK_N": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4, 5)},
}


@contextlib.contextmanager
def configured(kernel: str, config: dict[str, int]) -> Iterator[None]:
    """Launch this kernel with this configuration meanwhile."""
    before = configs.table()[kernel]
    configs.table()[kernel] = [{"arch": "any", "when": {}, "config": config, "from": "sweep"}]
    configs._pick.cache_clear()
    try:
        yield
    finally:
        configs.table()[kernel] = before
        configs._pick.cache_clear()


def tune(options: Options) -> dict[str, Any]:
    """Try the configurations of SWEEP on the case of each goal: {case: entry for configs.json}, to look at first."""
    if options.on_cpu:
        raise MinillmError("--tune measures, so it needs a CUDA device; --device cpu only counts")
    with on(torch.device(options.device)):
        return sweep(options)


def sweep(options: Options) -> dict[str, Any]:
    """As `tune`, on the current device."""
    arch, found = configs.arch(torch.device(options.device)), {}
    wanted = {str(g["key"]).rpartition(".")[0] for g in GOALS}
    for case in (c for c in cases(tiny=False) if c.key in wanted and c.tuned in SWEEP):
        axes = SWEEP[case.tuned]
        names, results = list(axes), []
        base = next(e["config"] for e in reversed(configs.table()[case.tuned]))
        for values in itertools.product(*axes.values()):
            config = {**base, **dict(zip(names, values))}
            try:
                with configured(case.tuned, config):
                    results.append((statistics.median(timed(case, options, 5)["ours"]), config))
            except Exception as fault:  # too much shared memory, say: no candidate
                options.out(f"{case.key} {config}: {str(fault).splitlines()[0][:100]}")
                synchronize(options.device)
        best = sorted(results, key=lambda r: r[0])[:3]
        for spent, config in best:
            options.out(f"{case.key}: {seconds(spent)} with {json.dumps(config)}")
        found[case.key] = {"arch": arch, "config": best[0][1], "from": f"bench kernels --tune, {seconds(best[0][0])}"}
    return found


def goals(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Each goal of the record beside what was reached: `reached` is a median, `met` says whether that is enough."""
    out = []
    for goal in record["setup"]["goals"]:
        entry = record["derived"].get(goal["key"])
        if entry is not None:
            value = entry["median"]
            met = value >= goal["at_least"] if "at_least" in goal else value <= goal["at_most"]
            out.append({**goal, "reached": value, "met": met})
    return out


def show(record: dict[str, Any]) -> str:
    if not record["predictions"]:
        lines = [f"{'kernel and shape':<34}{'counted':>10}{'analytic':>10}  bytes"]
        lines += [f"{k:<34}{r['median']:>10.0f}{r['analytic']:>10}" for k, r in record["results"].items()]
    else:
        lines = [table_of(record, list(record["predictions"])), ""]
        for key, entry in record["derived"].items():
            if "over_" in key:
                lines.append(f"{key:<60} {entry['median']:.2f} (p10 {entry['p10']:.2f}, p90 {entry['p90']:.2f})")
        for g in goals(record):
            limit = f"at least {g['at_least']:.3g}" if "at_least" in g else f"at most {g['at_most']:.3g}"
            lines.append(
                f"goal  {'met   ' if g['met'] else 'MISSED'}  {g['key']}: {g['what']} {g['reached']:.3g}, {limit}"
            )
    bad = [c for c in record["checks"] if not c["passed"]]
    lines += ["", f"{len(record['checks']) - len(bad)} of {len(record['checks'])} checks hold"]
    return "\n".join([*lines, *(f"FAIL  {c['name']}: {c['detail']}" for c in bad)])
