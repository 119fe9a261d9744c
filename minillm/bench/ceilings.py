"""The ceilings of this machine as a record: every sample of bandwidth, arithmetic and call overhead. Lesson 00."""

from __future__ import annotations

from typing import Any

import torch

from minillm.bench.common import Options, ceilings, ceilings_after, recorder
from minillm.roofline import measure
from minillm.roofline.device import Device


def run(options: Options) -> dict[str, Any]:
    """Measure, then measure again: the second pass must stay below what the first found as the roof, give or take."""
    options.model = options.model or "none"
    device = ceilings(options)
    book = recorder(options, device)
    options.out(f"ceilings sealed: sha256 {book.seal()}")
    for name, samples in measure.bandwidths(options.device).items():
        book.measured(name, samples, unit="bytes/s")
    for dtype in ("float32", "bfloat16"):
        sizes = (1024, 2048) if options.on_cpu else (4096, 8192)
        book.measured(f"gemm_{dtype}", measure.peak_flops(options.device, getattr(torch, dtype), sizes), unit="FLOP/s")
    book.measured("call_overhead", measure.call_overhead(options.device))
    check(book, device, options)
    return book.finish(ceilings_after(options))


def check(book: Any, device: Device, options: Options) -> None:
    """The probes compute something real, and two measurements of the same ceiling agree."""
    x = torch.randn(64, 64, device=options.device)
    exact = x.double() @ x.double()
    error = ((x @ x).double() - exact).abs().max().item()
    book.check(
        "products are products", error < 0.1, f"largest error {error:.1e} against fp64 (TF32 would give about 1e-2)"
    )
    again = max(max(book.record["results"][name]["samples"]) for name in ("read", "copy", "triad", "gather"))
    change = again / device.roof_bandwidth
    book.check("the roof is found twice", 0.7 < change < 1.3, f"second measurement {change:.2f} of the first")


def show(record: dict[str, Any]) -> str:
    lines = [f"{record['device']['name']}, {record['setup']['threads']} threads"]
    for key, entry in record["results"].items():
        scale, unit = {"bytes/s": (1e9, "GB/s"), "FLOP/s": (1e9, "GFLOP/s")}.get(entry["unit"], (1e-6, "us"))
        values = [f"{entry[name] / scale:.4g}" for name in ("median", "p10", "p90")]
        lines.append(f"  {key:<16}{values[0]:>8} {unit:<8} (p10 {values[1]}, p90 {values[2]})")
    for dtype, rates in record["ceilings"]["gemm"].items():
        shown = ", ".join(f"{rows} rows {rate / 1e9:.0f}" for rows, rate in rates.items())
        lines.append(f"  linears {dtype}: {shown} GFLOP/s")
    return "\n".join(lines)
