"""`minillm plan split`: does a prefill/decode split serve more within TTFT and TPOT bounds, and if not, why not?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from minillm.commands.plan import plan as plan_parser

if TYPE_CHECKING:
    from minillm.cluster.migration import Engine
    from minillm.cluster.paced_goodput import Confirmation
    from minillm.cluster.pools import Pool
    from minillm.cluster.split_planner import SplitPlan


def add_parser(actions: Any) -> None:
    parser = plan_parser(
        actions,
        "split",
        "Co-located engines against every prefill/decode split of them: goodput, bottleneck, and why (not); exit code "
        "1 if none serves what comes in time.",
        "minillm plan split --engines 4 --prompt-tokens 4097 --slo ttft=2,tpot=0.0065 --call-overhead 2",
        {
            "2P1D": "2 engines compute prompts, 1 decodes",
            "goodput": "requests/s, of which 9 in 10 keep both bounds",
            "chunk": "tokens a step (max_num_batched_tokens) that serve best",
            "TTFT, TPOT": "means at that goodput",
            "running": "requests that decode at a time, an engine",
            "full by": "what fails first above it: prefill (prompts queue), steps (tokens are late), link, kv (no "
            "memory where\n               it is decoded), seats (--max-num-seqs); or what is late even for one request",
        },
    )
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help="model shape or Hugging Face folder (default: %(default)s)")
    add("--dtype", default="bfloat16", help="float32, bfloat16 or float16 (default: %(default)s)")
    add("--device", default="h200", help="h200, h100, ..., or cpu, cuda for this machine (default: %(default)s)")
    add(
        "--call-overhead", type=float, metavar="US",
        help="microseconds of the host for an operator call, which no datasheet names (default: the device's, there 0)",
    )  # fmt: skip
    add("--engines", type=int, default=2, help="how many, all alike (default: %(default)s)")
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="devices an engine (default: %(default)s)")
    add("--tp-link", help="between the devices of an engine (default: that of the device)")
    add("--link", default="ib400", help="what KV crosses: nvlink4, pcie5, ib400, eth25, ... (default: %(default)s)")
    add("--bandwidth", type=float, metavar="GB/S", help="of the link in one direction, in place of the table's")
    add("--no-overlap", action="store_true", help="send KV after the prefill, not layer by layer while it is computed")
    add("--prompt-tokens", type=int, default=2048, help="of each request (default: %(default)s)")
    add("--max-tokens", type=int, default=256, help="of each answer, at least 2 (default: %(default)s)")
    add("--rate", type=float, help="requests a second that come (default: as many as can be served)")
    add("--slo", default="ttft=1,tpot=0.02", help="chat, rag, or bounds in seconds (default: %(default)s)")
    add("--max-num-seqs", type=int, default=256, help="most sequences an engine runs together (default: %(default)s)")
    add("--block-size", type=int, default=16, help="tokens a block of the KV cache (default: %(default)s)")
    add("--kv-tokens", type=int, help="tokens of an engine's KV cache (default: by memory)")
    add("--confirm", action="store_true", help="serve the load on a virtual clock as well: takes a minute or more")
    parser.set_defaults(act=run)


def run(args: argparse.Namespace) -> int:
    """1 when neither serves what comes within the bounds, or, where no rate is given, a request."""
    from dataclasses import replace

    from minillm.cluster.fleet import fleet_of
    from minillm.cluster.migration import Engine, Wire
    from minillm.cluster.paced_goodput import confirm_plan
    from minillm.cluster.split_planner import plan_split
    from minillm.cluster.step_times import Workload
    from minillm.commands.roofline import model_shape
    from minillm.config import dtype_name
    from minillm.errors import MinillmError
    from minillm.roofline.comm import link
    from minillm.roofline.device import device
    from minillm.roofline.parallel import NOWHERE
    from minillm.trace.latency import slo

    where, table = device(args.device), link(args.link)
    if args.call_overhead is not None:
        where = replace(where, call_overhead=args.call_overhead * 1e-6)
    if args.confirm and args.engines < 2:
        raise MinillmError(f"--confirm compares with a split, which needs at least 2 engines, got {args.engines}")
    bandwidth = table.bandwidth if args.bandwidth is None else args.bandwidth * 1e9
    wire = Wire(bandwidth, table.start + table.hop, not args.no_overlap, table.name)
    tp, of_device = args.tensor_parallel_size, NOWHERE
    if tp > 1:
        of_device = fleet_of(args.device, tp, args.tp_link).within
    elif args.tp_link is not None:
        raise MinillmError("--tp-link joins the devices of an engine: say with --tensor-parallel-size how many it has")
    engine = Engine(
        model_shape(args.model), where, dtype_name(args.dtype), args.max_num_seqs, args.block_size, args.kv_tokens,
        tp=tp, tp_link=of_device,
    )  # fmt: skip
    found = plan_split(
        engine, args.engines, Workload(args.prompt_tokens, args.max_tokens, args.rate), slo(args.slo), wire
    )  # fmt: skip
    paced = confirm_plan(engine, found) if args.confirm else None
    if args.json:
        more = {} if paced is None else {"paced": paced.to_dict()}
        asked = {"model": args.model, "device": where.name, "tensor_parallel_size": tp}
        print(json.dumps(asked | found.to_dict() | more))
    else:
        print(render(args.model, engine, found, paced))
    most = max(found.colocated.goodput, found.best.goodput if found.best else 0.0)
    return 0 if most and most >= (args.rate or 0.0) else 1


def render(model: str, engine: Engine, plan: SplitPlan, paced: Confirmation | None = None) -> str:
    """The question, a table of all pools, what a handoff costs, and the verdict."""
    from minillm.cluster.split_reasons import megabytes
    from minillm.roofline.evidence import seconds

    where = engine.device
    each = f", {engine.tp} an engine over {engine.tp_link.name}" if engine.tp > 1 else ""
    w, slo = plan.workload, plan.slo
    bounds = [
        f"{n[:-2].upper()} {seconds(b)}" for n in ("ttft_s", "tpot_s", "itl_s", "e2e_s") if (b := getattr(slo, n))
    ]
    comes = "as many as can be served" if w.rate is None else f"{w.rate:g} requests/s"
    lines = [
        f"{model} in {engine.dtype} on {plan.colocated.engines * engine.tp} x {where.name}{each} ({where.source}, "
        f"{where.call_overhead * 1e6:g} us a call)",
        f"  load      {comes}, {w.prompt_tokens} tokens in, {w.output_tokens} out",
        f"  SLO       {', '.join(bounds)} (9 requests in 10)",
        f"  link      {plan.wire.name}, {plan.wire.bandwidth / 1e9:.4g} GB/s, {seconds(plan.wire.latency_s)}",
        "",
        f"  {'':<14}{'goodput':>9}{'chunk':>8}{'TTFT':>10}{'TPOT':>10}{'running':>9}  full by",
    ]
    lines += [_line(p) for p in (plan.colocated, *plan.splits)]
    if (m := plan.migration) is not None and m.tokens:
        lines += [
            "",
            f"  handoff   {megabytes(m.bytes)}: locate {seconds(m.locate_s)}, transfer {seconds(m.transfer_s)} "
            f"({seconds(m.hidden_s)} hidden), layout {seconds(m.layout_s)}, allocate {seconds(m.allocate_s)}",
        ]
    if paced is not None:
        lines += ["", "  on a virtual clock, by the scheduler that serves:"]
        for name, said, seen in zip((paced.colocated, paced.split), paced.predicted, paced.paced, strict=True):
            lines.append(f"  {name:<14}{said:>9.4g} predicted{seen:>9.4g} paced")
    answer = "yes" if plan.pays else "no"
    lines += ["", f"  {answer if plan.clear else f'{answer}, perhaps'}: {plan.words}"]
    if engine.tp > 1:
        lines.append(
            "  note      an engine with ranks captures no CUDA graph, and its KV leaves after each chunk, by one port"
        )
    if where.source == "datasheet" and not where.call_overhead:
        lines.append("  note      a datasheet names no call overhead, and without it small chunks cost nothing extra: "
                     "give --call-overhead")  # fmt: skip
    return "\n".join(lines)


def _line(p: Pool) -> str:
    from minillm.roofline.evidence import seconds

    f = p.forecast
    running = f"{f.running:.3g}" if p.goodput else "-"
    return (
        f"  {p.name:<14}{p.goodput:>7.4g}/s{p.budget:>8}{seconds(f.ttft_s):>10}{seconds(f.tpot_s):>10}{running:>9}"
        f"  {p.bottleneck}"
    )
