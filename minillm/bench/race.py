"""One stream on two engines, one after the other, the order changing with every repeat: `bench single`.

128 random tokens in, 64 greedy tokens out. Whatever disturbs the machine disturbs both, and the ratio is taken within a
repeat. `bench throughput` compares many requests, and more engines.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from minillm.bench import account, peers
from minillm.bench.common import (
    Options,
    ceilings,
    ceilings_after,
    clock,
    progress,
    random_tokens,
    read_bandwidth,
    recorder,
)
from minillm.bench.ladder import TOLERANCE
from minillm.models import hub
from minillm.roofline.evidence import seconds


def run(options: Options) -> dict[str, Any]:
    """Race on one stream. Returns the record."""
    from minillm.llm import LLM
    from minillm.request import SamplingParams

    options.model = options.model or hub.EMBEDDED
    options.peer = options.peer or "transformers"
    repeats = options.repeats or 7
    folder = hub.resolve(options.model)
    device = ceilings(options)
    room = options.prompt + options.new
    llm = LLM(folder, dtype=options.dtype, device=options.device, max_num_seqs=1, max_model_len=room)
    config = llm.engine.model.config
    prompts, new = [random_tokens(random.Random(options.seed), options.prompt, config.vocab_size)], [options.new]
    peer = peers.make(options.peer, folder, options.torch_dtype, options.device)

    book = recorder(
        options, device, weights="checkpoint", repeats=repeats, peer=options.peer, requests=1,
        prompt_tokens=[len(p) for p in prompts], new_tokens=new,
    )  # fmt: skip
    book.predict("minillm", config, options.dtype, prompts=[len(p) for p in prompts], new_tokens=new)
    # A step's cost is straight in its context: the middle one stands for their mean.
    book.predict("decode", config, options.dtype, rows=[(1, len(prompts[0]) + (new[0] - 2) // 2)])
    options.out(f"predictions sealed: sha256 {book.seal()}")

    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in new]
    outputs: dict[str, Any] = {}

    def ours() -> None:
        outputs["minillm"] = llm.generate(prompts, params, use_tqdm=False)

    def theirs() -> None:
        outputs["peer"] = peer.generate(prompts, new)

    sides: dict[str, Callable[[], None]] = {"minillm": ours, "peer": theirs}
    for side in sides.values():
        side()  # warm: code paths, thread pools, allocator
    samples: dict[str, list[float]] = {"minillm": [], "peer": [], "decode": [], "read": []}
    probe = read_bandwidth(options)
    for i in progress(range(repeats), options.step):
        for name in sorted(sides, reverse=i % 2 == 1):
            samples[name].append(clock(sides[name], options.device))
        samples["read"].append(probe())
        metrics = outputs["minillm"][0].metrics
        samples["decode"].append((metrics["e2e_latency"] - metrics["time_to_first_token"]) / max(1, new[0] - 1))

    for name in sides:
        book.measured(name, samples[name])
        book.derive(f"{name}.tokens_per_s", "rate", [name], count=sum(new))
    book.measured("read", samples["read"], unit="bytes/s", note="streaming reads in the same repeat")
    book.derive("ratio", "ratio", ["peer", "minillm"])
    book.derive("minillm.residual", "residual", ["minillm"])
    book.measured("decode", samples["decode"])
    book.derive("decode.share", "share", ["decode"])
    book.derive("decode.of_bandwidth", "of_bandwidth", ["decode", "read"])
    book.derive("decode.residual", "residual", ["decode"])
    accounts = [account.decode_account(llm, prompts[0], new[0]) for _ in progress(range(repeats), "account")]
    for term in (*account.TERMS, "total"):
        book.measured(f"account.{term}", [max(a[term], 1e-9) for a in accounts], note="instrumented decode step")
    check(book, llm, peer, prompts, new, outputs, options)
    return book.finish(ceilings_after(options))


def check(book: Any, llm: Any, peer: Any, prompts: Any, new: Any, outputs: Any, options: Options) -> None:
    """Both sides computed the same model, and each the tokens it was asked for."""
    mine = [o.outputs[0].token_ids for o in outputs["minillm"]]
    counts = [len(t) for t in mine] == new and [len(t) for t in outputs["peer"]] == new
    book.check("both sides wrote every token asked for", counts, f"{sum(new)} tokens for {len(new)} requests")
    request = llm.engine.make_request(prompts[0], _greedy(1))
    llm.engine.runner.start([request])
    own = llm.engine.runner.forward([request])[0].float()
    llm.engine.runner.finish(request)
    other = peer.last_logits(prompts[0])
    error = ((own - other).abs().max() / other.abs().max()).item()
    limit = TOLERANCE[options.dtype]
    detail = f"largest difference {error:.2e} of the largest logit, allowed {limit:.0e}"
    book.check("logits after the first prompt agree with the peer's", error <= limit, detail)
    same = [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(x)) for x, y in zip(mine, outputs["peer"])]
    book.record["setup"]["tokens_equal_before_rounding_parts_them"] = same
    if options.dtype == "float32":
        book.check("greedy tokens are the peer's", same == new, f"equal tokens by request: {same}")


def _greedy(new: int) -> Any:
    from minillm.request import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)


def show(record: dict[str, Any]) -> str:
    """The record as text: both rates, their ratio, the share of the roof, the account of a step."""
    rate = lambda name: record["derived"][f"{name}.tokens_per_s"]
    spread = lambda e, f: f"{e['median']:{f}} (p10 {e['p10']:{f}}, p90 {e['p90']:{f}})"
    setup = record["setup"]
    lines = [
        f"{setup['model']}, {setup['dtype']}, {setup['threads']} threads: {setup['requests']} request(s), "
        f"{sum(setup['prompt_tokens'])} tokens in, {sum(setup['new_tokens'])} out, greedy, {setup['repeats']} repeats",
        f"  minillm       {spread(rate('minillm'), '.1f')} tokens/s",
        f"  {setup['peer']:<13} {spread(rate('peer'), '.1f')} tokens/s",
        f"  ratio         {spread(record['derived']['ratio'], '.2f')}",
    ]
    decode, prediction = record["results"]["decode"], record["predictions"]["decode"]["prediction"]
    share, read = record["derived"]["decode.of_bandwidth"], record["results"]["read"]["median"] / 1e9
    lines += [
        f"  decode step   {seconds(decode['median'])}, predicted {seconds(prediction['expected'])}, "
        f"at least {seconds(prediction['lower'])}",
        f"  bandwidth     {share['median']:.0%} (p10 {share['p10']:.0%}, p90 {share['p90']:.0%}) of the "
        f"{read:.1f} GB/s that plain reads reached beside it",
        "",
        f"  {'one decode step':<16}{'time':>10}{'share':>8}   predicted",
    ]
    lines += _account_lines(record, prediction)
    lines += [f"  check  {'ok  ' if c['passed'] else 'FAIL'}  {c['name']}: {c['detail']}" for c in record["checks"]]
    return "\n".join(lines)


PREDICTED = {
    "linears": ("qkv", "o_proj", "gate_up", "down"), "lm_head": ("lm_head",), "attention": ("attention",),
    "norms": ("rms_norm", "qk_norm", "residual"), "rope_kv_write": ("rope", "kv_write"), "activation": ("silu_mul",),
    "sampling": (), "text": (), "glue": ("embedding",),
}  # fmt: skip


def _account_lines(record: dict[str, Any], prediction: dict[str, Any]) -> list[str]:
    total = record["results"]["account.total"]["median"]
    predicted = {t["name"]: t["seconds"] for t in prediction["terms"]}
    lines = []
    for term in account.TERMS:
        spent = record["results"][f"account.{term}"]["median"]
        expected = sum(predicted.get(name, 0.0) for name in PREDICTED[term])
        lines.append(
            f"  {term:<16}{seconds(spent):>10}{spent / total:>8.1%}   {seconds(expected) if expected else '-'}"
        )
    plain = record["results"]["decode"]["median"]
    return [*lines, f"  {'all':<16}{seconds(total):>10}{'':>8}   with the clocks; {seconds(plain)} without"]
