"""`minillm plan parallel`: which of tensor, pipeline and data parallelism serves a model on these devices, and why."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from minillm.commands.plan import plan as plan_parser

if TYPE_CHECKING:
    from minillm.cluster.planner import Option, Plan


def add_parser(actions: Any) -> None:
    parser = plan_parser(
        actions,
        "parallel",
        "Rank tensor, pipeline and data parallelism for a model, devices and users; exit code 1 if none will do.",
        "minillm plan parallel --model llama-3.1-70b --device h200 --count 8 --concurrency 16 --slo tpot=0.02",
        {
            "tp, pp, dp": "devices that share each layer, stages of layers, replicas",
            "TTFT, TPOT": "means of the busiest replica under the load",
            "tokens/s": "that all replicas write",
            "most": "requests/s (--rate) or users (--concurrency) that all replicas serve within the SLO",
            "seats": "requests that a replica can hold: by memory, and by --max-num-seqs",
            "chunk": "tokens a step (--max-num-batched-tokens) that serve best",
            "verdict": "good; slow: misses the SLO; full: does not fit; uncut: sizes do not divide. Then what most of "
            "the\n               difference to the best is, unless it is too small to tell",
        },
    )
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help="model shape or Hugging Face folder (default: %(default)s)")
    add("--dtype", default="bfloat16", help="float32, bfloat16 or float16 (default: %(default)s)")
    add("--device", default="h200", help="h200, h100, ..., or cpu, cuda for this machine (default: %(default)s)")
    add("--count", type=int, default=8, help="how many devices (default: %(default)s)")
    add("--link", help="between devices of a node: nvlink4, pcie5, ib400, eth25, ... (default: that of the device)")
    add("--node", type=int, help="devices a node (default: all in one)")
    add("--between", help="link between nodes, for more devices than a node has")
    add("--prompt-tokens", type=int, default=1000, help="of each request (default: %(default)s)")
    add("--max-tokens", type=int, default=200, help="of each answer, at least 2 (default: %(default)s)")
    add("--concurrency", type=int, help="so many users, each waits for an answer (default: 1)")
    add("--rate", type=float, help="requests a second instead")
    add("--slo", help="chat, rag, agent, batch, or bounds in seconds as ttft=0.5,tpot=0.05")
    add("--max-num-seqs", type=int, default=256, help="most sequences a replica runs together (default: %(default)s)")
    add("--max-num-batched-tokens", type=int, help="token budget of a step (default: what serves best, 64 to 8192)")
    add(
        "--call-overhead", type=float, metavar="US",
        help="microseconds of the host for an operator call, which no datasheet names (default: the device's, there 0)",
    )  # fmt: skip
    parser.set_defaults(act=run)


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from minillm.cluster.migration import BUDGETS
    from minillm.cluster.planner import Demand, Question, fleet_of, plan
    from minillm.commands.roofline import model_shape
    from minillm.config import dtype_name
    from minillm.errors import MinillmError
    from minillm.trace.latency import SLO, slo

    if args.concurrency is not None and args.rate is not None:
        raise MinillmError("--rate is an open loop and --concurrency a closed one: give one of them")
    if args.between is not None and args.node is None:
        raise MinillmError("--between joins nodes: say with --node how many devices each has")
    users = 1 if args.concurrency is None and args.rate is None else args.concurrency
    fleet = fleet_of(args.device, args.count, args.link, args.node, args.between)
    if args.call_overhead is not None:
        fleet = replace(fleet, device=replace(fleet.device, call_overhead=args.call_overhead * 1e-6))
    budgets = BUDGETS if args.max_num_batched_tokens is None else (args.max_num_batched_tokens,)
    found = plan(
        Question(
            model_shape(args.model), fleet,
            Demand(args.prompt_tokens, args.max_tokens, concurrency=users, rate=args.rate),
            slo(args.slo) if args.slo else SLO(), dtype_name(args.dtype), budgets=budgets,
            max_num_seqs=args.max_num_seqs,
        )
    )  # fmt: skip
    print(json.dumps({"model": args.model} | found.to_dict()) if args.json else render(args.model, found))
    return 0 if found.good else 1


def render(model: str, plan: Plan) -> str:
    """The question, a table of all options with why they are where they are, and the verdict."""
    from minillm.roofline.evidence import seconds

    q = plan.question
    fleet, demand = q.fleet, q.demand
    nodes = f", {fleet.node} a node, {fleet.between.name} between nodes" if fleet.node and fleet.between else ""
    load = f"{demand.rate:g} requests/s" if demand.rate is not None else f"{demand.concurrency} at a time"
    bounds = [
        f"{n[:-2].upper()} {seconds(b)}" for n in ("ttft_s", "tpot_s", "itl_s", "e2e_s") if (b := getattr(q.slo, n))
    ]
    most = "most users" if demand.rate is None else "most req/s"
    lines = [
        f"{model} in {q.dtype} on {fleet.count} x {fleet.device.name} ({fleet.device.source})",
        f"  links     {fleet.within.name}{nodes}",
        f"  load      {load}, {demand.prompt_tokens} tokens in, {demand.output_tokens} out",
        f"  SLO       {', '.join(bounds) or 'none'} (means)",
        "",
        f"  {'tp':>3}{'pp':>4}{'dp':>5}{'TTFT':>10}{'TPOT':>10}{'tokens/s':>10}{most:>12}"
        f"{'seats':>7}{'chunk':>7}  verdict",
    ]
    lines += [_line(o, o.most_users if demand.rate is None else o.most) for o in plan.options]
    lines += ["", f"  why       {plan.why}"]
    lines += [f"  would do  {change.text}" for change in plan.advice]
    if not plan.good and not plan.advice:
        lines.append("  would do  nothing that this planner knows: no load, device or link in its tables is enough")
    if fleet.device.source == "datasheet" and not fleet.device.call_overhead:
        lines.append("  note      a datasheet names peaks and no call overhead: real steps are slower, small ones "
                     "most; give --call-overhead")  # fmt: skip
    return "\n".join(lines)


def _line(o: Option, most: float) -> str:
    from minillm.cluster.plan_advice import number
    from minillm.roofline.evidence import seconds

    shape = f"  {o.tp:>3}{o.pp:>4}{o.dp:>5}"
    if o.at is None:
        return f"{shape}{'-':>10}{'-':>10}{'-':>10}{'-':>12}{'-':>7}{'-':>7}  {o.verdict}: {o.why}"
    ttft = "no end" if o.at.ttft_s == float("inf") else seconds(o.at.ttft_s)
    rates = f"{number(o.tokens_per_s):>10}{number(most):>12}{o.seats:>7}{o.budget:>7}"
    return f"{shape}{ttft:>10}{seconds(o.at.tpot_s):>10}{rates}  {o.verdict}{': ' + o.why if o.why else ''}"
