"""`minillm doctor`: what this machine is, what works on it, what is missing and how to get it."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import shutil
from typing import Any

from minillm.commands import command

# package -> what it is for; the first group is needed by the engine itself
NEEDED = {"torch": "the engine", "transformers": "chat templates and the logits oracle", "tokenizers": "text to tokens"}
NEEDED |= {"safetensors": "weights", "gguf": "the embedded model", "numpy": "arrays", "tqdm": "progress"}
EXTRA = {
    "triton": ("kernels, lessons 04 to 08", "pip install triton"),
    "jupyterlab": ("lessons", "pip install 'minillm[lab]'"),
    "ipywidgets": ("explorers in the lessons", "pip install 'minillm[lab]'"),
    "matplotlib": ("figures", "pip install 'minillm[lab]'"),
    "nbclient": ("make course", "pip install 'minillm[lab]'"),
    "nbgrader": ("instructors' autograding", "pip install 'minillm[nbgrader]'"),
    "pytest": ("make test", "pip install 'minillm[test]'"),
}
LESSONS_NEED = ("jupyterlab", "ipywidgets", "matplotlib", "smollm2-135m")


def add_parser(sub: Any) -> None:
    parser = command(
        sub, "doctor", "Say what this machine is, what works on it and what is missing.", "minillm doctor --json"
    )
    ceilings = parser.add_mutually_exclusive_group()
    ceilings.add_argument("--remeasure", action="store_true", help="measure this machine's ceilings again")
    ceilings.add_argument("--no-measure", action="store_true", help="leave the ceilings out unless they are cached")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = examine(remeasure=args.remeasure, measure=not args.no_measure)
    print(json.dumps(report) if args.json else render(report))
    return 1 if report["missing_needed"] else 0


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine(remeasure: bool = False, measure: bool = True) -> dict[str, Any]:
    """Everything that `doctor` says, as plain data."""
    import torch

    from minillm.device import free_memory, pick_dtype
    from minillm.models import hub
    from minillm.roofline.device import cached_machine, this_machine
    from minillm.roofline.measure import cpu_model

    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    ceilings = this_machine(remeasure=remeasure) if measure or remeasure else cached_machine()
    missing = [{"package": p, "for": why, "get": how} for p, (why, how) in EXTRA.items() if version(p) is None]
    if not hub.is_fetched():
        missing.append({"package": hub.EMBEDDED, "for": "every lesson", "get": "minillm fetch"})
    return {
        "device": torch.cuda.get_device_name(0) if gpu else cpu_model(),
        "kind": device.type,
        "threads": torch.get_num_threads(),
        "free_memory_bytes": free_memory(device),
        "free_disk_bytes": shutil.disk_usage(hub.cache_dir()).free,
        "auto_dtype": str(pick_dtype("auto", "bfloat16", device)).removeprefix("torch."),
        "python": platform.python_version(),
        "versions": {p: v for p in ("minillm", *NEEDED, *EXTRA) if (v := version(p))},
        "ceilings": None if ceilings is None else ceilings.to_dict() | {"busy": ceilings.busy},
        "lessons": lessons(gpu, [m["package"] for m in missing]),
        "missing": missing,
        "missing_needed": [p for p in NEEDED if importlib.util.find_spec(p) is None],
    }


def lessons(gpu: bool, missing: list[str]) -> list[dict[str, str]]:
    """Which of the lessons in this checkout run fully here, and what the others wait for."""
    from minillm.course.lab import lesson_files

    needed = [p for p in missing if p in LESSONS_NEED]
    full = "fully" if gpu else "fully on the CPU; GPU numbers come from records"
    full = f"not yet: {', '.join(needed)} missing" if needed else full
    return [{"lesson": path.stem, "runs": full} for path in lesson_files()]


def ceilings_line(c: dict[str, Any]) -> str:
    peaks = ", ".join(f"{dtype} {value / 1e9:.0f} GFLOP/s" for dtype, value in c["peak_flops"].items())
    moves = ", ".join(f"{name} {c[name + '_bandwidth'] / 1e9:.1f}" for name in ("read", "copy", "triad", "gather"))
    busy = ", while the machine was busy" if c.get("busy") else ""
    return f"{moves} GB/s; {peaks}; {c['call_overhead'] * 1e6:.1f} us a call (measured here{busy})"


def render(report: dict[str, Any]) -> str:
    kind = f"{report['kind']}, {report['threads']} threads, auto dtype {report['auto_dtype']}"
    memory, disk = report["free_memory_bytes"] / 1e9, report["free_disk_bytes"] / 1e9
    lines = [f"device     {report['device']} ({kind})", f"free       {memory:.1f} GB memory, {disk:.1f} GB disk"]
    lines += [f"versions   Python {report['python']}, " + ", ".join(f"{p} {v}" for p, v in report["versions"].items())]
    if report["ceilings"]:
        lines += ["ceilings   " + ceilings_line(report["ceilings"])]
    else:
        lines += ["ceilings   not measured yet; run minillm doctor"]
    lines += [f"lesson     {entry['lesson']} runs {entry['runs']}" for entry in report["lessons"]]
    lines += [f"missing    {m['package']} (for {m['for']}): {m['get']}" for m in report["missing"]]
    lines += [f"missing    {p}, which the engine needs: pip install minillm" for p in report["missing_needed"]]
    return "\n".join(lines if report["missing"] or report["missing_needed"] else [*lines, "missing    nothing"])
