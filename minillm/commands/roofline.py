"""`minillm roofline`: what a step should take on a machine, term by term, before anything runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from minillm.commands import command


def add_parser(sub: Any) -> None:
    parser = command(
        sub,
        "roofline",
        "Predict the time of one step from the roofline of a device.",
        "minillm roofline --model llama-3.1-8b --device h200 --batch 1 --context 4096",
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="model shape or Hugging Face folder (default: %(default)s)"
    )
    parser.add_argument(
        "--device", default="auto", help="h200, a100, ..., or cpu, cuda for this machine (default: this machine)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="float32, bfloat16 or float16 (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences in the step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=None, help="tokens each already has (default: 4096, prefill 0)")
    parser.add_argument(
        "--prefill", type=int, default=None, metavar="N", help="compute N new tokens a sequence, not one"
    )
    parser.add_argument("--remeasure", action="store_true", help="measure this machine's ceilings again")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from minillm.config import dtype_name
    from minillm.errors import MinillmError
    from minillm.roofline import cost
    from minillm.roofline.device import DATASHEET, device, this_machine
    from minillm.roofline.predict import FORMULA, predict_step

    for name in ("batch", "prefill"):
        if (given := getattr(args, name)) is not None and not 1 <= given <= 1_000_000:
            raise MinillmError(f"--{name} must be a whole number from 1 to 1000000, got {given}")
    if args.context is not None and not 0 <= args.context <= 100_000_000:
        raise MinillmError(f"--context must be a whole number from 0 to 100000000, got {args.context}")
    if args.remeasure and args.device.lower() in DATASHEET:
        raise MinillmError(f"--remeasure measures this machine; {args.device} is known by its datasheet only")
    dtype = dtype_name(args.dtype)
    config = model_shape(args.model)
    context = args.context if args.context is not None else 0 if args.prefill else 4096
    where = device(args.device) if not args.remeasure else this_machine(args.device, remeasure=True)
    rows = [(args.prefill or 1, context)] * args.batch
    p = predict_step(config, rows, where, dtype)
    needed = cost.weight_bytes(config, dtype) + sum(map(sum, rows)) * cost.kv_bytes_per_token(config, dtype)
    report = {
        "model": args.model, "device": where.name, "source": where.source, "dtype": dtype, "batch": args.batch,
        "new_tokens": args.prefill or 1, "context": context, "parameters": cost.parameter_count(config),
        "weight_bytes": cost.weight_bytes(config, dtype), "kv_bytes_per_token": cost.kv_bytes_per_token(config, dtype),
        "memory_needed_bytes": needed, "memory_bytes": where.memory_bytes, "fits": needed <= where.memory_bytes,
        "tokens_per_s": p.tokens_per_s, "tokens_per_s_bounds": p.tokens_per_s_bounds, "formula": FORMULA, **p.to_dict(),
    }  # fmt: skip
    print(json.dumps(report) if args.json else render(report, where, p))
    return 0


def model_shape(name: str) -> Any:
    """A preset by name, or the configuration in a Hugging Face folder."""
    from pathlib import Path

    from minillm.config import ModelConfig
    from minillm.errors import MinillmError
    from minillm.models.presets import PRESETS

    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    if name and Path(name).is_dir():
        return ModelConfig.from_folder(name)
    raise MinillmError(f"model {name!r} is no shape known here ({', '.join(PRESETS)}) and no folder")


def render(r: dict[str, Any], where: Any, p: Any) -> str:
    """The prediction as text: what is computed, terms, bounds, verdict."""
    from minillm.roofline.evidence import seconds

    what = f"prefill of {r['new_tokens']} tokens" if r["new_tokens"] > 1 else "decode of one token"
    many = f"{r['batch']} sequence{'s' * (r['batch'] > 1)} with {r['context']} tokens of context each"
    size = f"{r['parameters'] / 1e9:.3f} billion parameters, {r['weight_bytes'] / 1e9:.2f} GB"
    rate_low, rate_high = r["tokens_per_s_bounds"]
    lines = [
        f"{r['model']} in {r['dtype']} on {where.name} ({where.source})",
        f"  step      {what} for {many}",
        f"  model     {size}; KV {r['kv_bytes_per_token'] / 1e3:.1f} kB a token",
        f"  device    {where.peak(r['dtype']) / 1e12:.4g} TFLOP/s, {where.roof_bandwidth / 1e9:.4g} GB/s, "
        f"ridge {p.ridge:.1f} FLOP/byte, {where.call_overhead * 1e6:.1f} us a call",
        "",
        f"  {'operator':<12}{'time':>10}{'share':>8}{'arithmetic':>12}{'bytes':>10}{'library':>10}{'calls':>10}  bound",
    ]
    for t in p.terms:
        library, calls = _or_dash(t.kernel_seconds), _or_dash(t.overhead_seconds)
        lines.append(
            f"  {t.name:<12}{seconds(t.seconds):>10}{t.seconds / p.expected:>8.1%}{seconds(t.flops_seconds):>12}"
            f"{seconds(t.bytes_seconds):>10}{library:>10}{calls:>10}  {t.bound}"
        )
    lines += [
        "",
        f"  expected  {seconds(p.expected)} a step, {p.tokens_per_s:.4g} tokens/s",
        f"  bounds    {seconds(p.lower)} (everything overlaps and fuses, {rate_high:.4g} tokens/s) "
        f"to {seconds(p.upper)} (nothing overlaps, {rate_low:.4g} tokens/s)",
        f"  bound by  {p.bound}: {p.flops / 1e9:.4g} GFLOP over {p.bytes / 1e9:.4g} GB is {p.intensity:.1f} FLOP/byte, "
        f"{'above' if p.bound == 'compute' else 'below'} the ridge",
    ]
    if where.gemm:
        lines.append(
            "  note      time = largest of arithmetic, bytes and library (products as measured here), plus calls"
        )
    if where.busy:
        lines.append("  note      these ceilings were measured on a busy machine and are too low: add --remeasure")
    if where.source == "datasheet":
        lines.append("  note      a datasheet names peaks and no call overhead: a real step is slower")
    if not r["fits"]:
        need, have = r["memory_needed_bytes"] / 1e9, r["memory_bytes"] / 1e9
        lines.append(f"  note      weights and KV need {need:.1f} GB, the device has {have:.1f} GB: one is not enough")
    return "\n".join(lines)


def _or_dash(value: float) -> str:
    from minillm.roofline.evidence import seconds

    return seconds(value) if value else "-"
