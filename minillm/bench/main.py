"""The command line of the benches, shared by `minillm bench` and `python3 -m minillm.bench`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import minillm

STEPS = (
    "ceilings", "ladder", "single", "throughput", "scheduler", "serving", "nano", "quality", "quant", "kernels",
    "launch", "agree", "parallel",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "step",
        choices=STEPS,
        help="ceilings of the machine; ladder: one step of each rung; single: one stream against a peer; "
        "throughput: workloads W1 to W3 beside peers; scheduler: host time of a step's schedule; "
        "serving: streams through the server beside the engine alone; "
        "agree: what clients measure beside what the server says of the same requests; "
        "nano: the nano-vllm workload on Qwen3-0.6B shapes; quality: what quantised weights do to the answers; "
        "quant: what they do to the speed, once a quality record admits them; kernels: each against its roofline "
        "and torch; launch: a decode step eager and as a CUDA graph; parallel: what ranks say to each other, a "
        "model on several of them, pipelines, the split of prefill and decode",
    )
    parser.add_argument("--model", help="embedded model, folder, hub name, or for ladder a shape with random weights")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto (bf16 where supported), float32, bfloat16, float16")
    parser.add_argument(
        "--peer",
        help="other engines, as transformers,vllm=PYTHON,llama.cpp=PYTHON: the Python of an environment that has them "
        "(default: transformers, the only one of single); for agree the second client, guidellm=PYTHON",
    )
    parser.add_argument(
        "--gguf", metavar="FILE", help="throughput: weights for llama.cpp (default: the embedded model's)"
    )
    parser.add_argument("--workloads", help="throughput: some of W1,W2,W3 (default: all)")
    parser.add_argument("--repeats", type=int, help="samples of each measurement (default: by step)")
    parser.add_argument("--threads", type=int, help="CPU threads of both sides (default: torch's choice)")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens (default: %(default)s)")
    parser.add_argument(
        "--prompt", type=int, help="prompt tokens of single, throughput and serving (default: 128), of agree (192)"
    )
    parser.add_argument(
        "--new", type=int, help="new tokens of single, throughput and serving (default: 64), of agree (32)"
    )
    parser.add_argument(
        "--requests",
        type=int,
        help="requests of throughput, streams of serving (default: 32); of nano (256), of agree (12)",
    )
    parser.add_argument("--contexts", help="contexts of ladder, as 128,512,1024")
    parser.add_argument("--cached-ceilings", action="store_true", help="skip measuring the ceilings; not for a record")
    parser.add_argument("--tune", action="store_true", help="kernels: try configurations, propose entries, no record")
    parser.add_argument("--out", metavar="DIR", help="write the record there, as STEP-cpu.json or STEP-cuda.json")


# What a step may be asked, and what its record names in its command. None: not given, so `Options` decides.
ASKED = (
    "model", "device", "dtype", "peer", "repeats", "threads", "seed", "prompt", "new", "requests", "contexts",
    "workloads", "gguf",
)  # fmt: skip
# Options that only some steps have. The others would ignore them, so they refuse them.
OWNERS = {
    "model": ("ladder", "single", "throughput", "serving", "agree", "nano", "quality", "quant", "parallel"),
    "repeats": tuple(step for step in STEPS if step not in ("ceilings", "quality")),
    "contexts": ("ladder",),
    "peer": ("single", "throughput", "agree"),
    "prompt": ("single", "throughput", "serving", "agree"),
    "new": ("single", "throughput", "serving", "agree"),
    "requests": ("throughput", "serving", "agree", "nano"),
    "workloads": ("throughput",),
    "gguf": ("throughput",),
}


def command_line(step: str, given: Mapping[str, Any]) -> str:
    """How to run this again: what was asked, without where it was written."""
    from minillm.bench.common import Options
    from minillm.bench.peers import without_paths

    shown = dict(given)
    if "peer" in shown:
        shown["peer"] = without_paths(shown["peer"])
    if "gguf" in shown:
        shown["gguf"] = "FILE"
    changed = [f"--{name} {shown[name]}" for name in ASKED if name in shown and shown[name] != getattr(Options, name)]
    return " ".join(["python3 -m minillm.bench", step, *changed])


def run(args: argparse.Namespace) -> int:
    """Run one step, print it, write its record. 1 when the record does not verify."""
    from minillm.bench.common import Options
    from minillm.errors import MinillmError
    from minillm.roofline.record import save, verify

    given = {name: value for name in ASKED if (value := getattr(args, name)) is not None}
    for name in given.keys() & OWNERS.keys():
        if args.step not in OWNERS[name]:
            raise MinillmError(f"--{name} belongs to {' and '.join(OWNERS[name])}; {args.step} would ignore it")
    if args.step == "single" and given.get("new", Options.new) < 2:
        raise MinillmError("--new must be at least 2: the first token belongs to the prompt, the steps come after it")
    if args.out and Path(args.out).exists() and not Path(args.out).is_dir():
        raise MinillmError(f"--out must be a folder, and {args.out} is a file")
    if args.tune and (args.step != "kernels" or args.out):
        raise MinillmError("--tune belongs to kernels and proposes entries for configs.json: it writes no record")
    command = command_line(args.step, given)
    if "contexts" in given:
        try:
            given["contexts"] = tuple(sorted({int(c) for c in args.contexts.split(",")}))
        except ValueError:
            raise MinillmError(f"--contexts must look like 128,512,1024, got {args.contexts!r}") from None
    if args.step == "nano":
        given.setdefault("requests", 256)
    if args.step == "agree":
        given = {"prompt": 192, "new": 32, "requests": 12} | given
    if args.step == "parallel" and args.dtype == "auto" and Options(device=args.device).on_cpu:
        given["dtype"] = "float32"  # sums in another order then give the same tokens
    if "workloads" in given:
        given["workloads"] = tuple(dict.fromkeys(args.workloads.split(",")))
    options = Options(args.step, cached_ceilings=args.cached_ceilings, command=command, **given)
    step = _step(args.step)
    if args.tune:
        print(json.dumps(step.tune(options), indent=1))
        return 0
    record = step.run(options)
    faults = verify(record)
    print(json.dumps(record) if args.json else step.show(record))
    if args.out:
        path = save(record, args.out)
        print(f"record written: {path}", file=sys.stderr)
    for fault in faults:
        print(f"fault: {fault.key} {fault.message}", file=sys.stderr)
    return 1 if faults else 0


def _step(name: str) -> Any:
    if name in ("kernels", "launch"):
        _find_kernels()
    return importlib.import_module(f"minillm.bench.{'race' if name == 'single' else name}")


def _find_kernels() -> None:
    """In a checkout that is not installed, as on a bare GPU machine, `minillm.kernels` is its folder `kernels`."""
    from minillm.device import expect_triton

    expect_triton("a step that runs no kernels")
    if importlib.util.find_spec("minillm.kernels") is None:
        minillm.__path__.append(str(Path(__file__).resolve().parents[2]))


def main(argv: Sequence[str] | None = None) -> int:
    from minillm.cli import answer

    parser = argparse.ArgumentParser(
        prog="python3 -m minillm.bench",
        description="Predict, measure and record one step of the ladder.",
        epilog="example: python3 -m minillm.bench ladder --device cuda --out benchmarks/records",
    )
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of text")
    return answer(lambda: run(parser.parse_args(argv)))
