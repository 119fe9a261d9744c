"""The workload of nano-vllm's benchmark in one command: 256 requests, 100 to 1024 tokens in and out, temperature 0.6.

Qwen3-0.6B shapes with random weights, so nothing is fetched, and torch, triton, transformers and numpy suffice. Text is
left out: neither that benchmark nor this one streams it. `--device cpu --requests 4` is a look at the first four.
"""

from __future__ import annotations

from typing import Any

from minillm.bench import judge, workloads
from minillm.bench.common import Options, ceilings, ceilings_after, clock, load_model, progress, recorder
from minillm.bench.workloads import Workload
from minillm.engine import Engine
from minillm.engine_config import EngineConfig
from minillm.request import Request, SamplingParams
from minillm.roofline.evidence import seconds

MODEL = "qwen3-0.6b"
TEMPERATURE = 0.6
BUDGET = {"cpu": 512, "cuda": 16384}  # tokens a step; nano-vllm's own is 16,384


class NoTokenizer:
    """Stands where an engine has its tokenizer: no text goes in."""

    backend = None
    folder = "none"
    chat_template = None
    eos_token_ids = frozenset[int]()


class NoText:
    """A detokenizer that makes no text."""

    def __init__(self, *_: Any) -> None:
        pass

    def append(self, token_ids: Any) -> str:
        return ""

    def finish(self) -> str:
        return ""


def run(options: Options) -> dict[str, Any]:
    """Predict, seal, warm up, measure, check. Returns the record."""
    options.model = options.model or MODEL
    repeats = options.repeats or (1 if options.on_cpu else 3)
    work = workloads.nano(options.requests)
    device = ceilings(options)
    budget = BUDGET["cpu" if options.on_cpu else "cuda"]
    model, source = load_model(options, work.longest + 1)
    book = recorder(
        options, device, weights=source, repeats=repeats, requests=len(work.prompts), temperature=TEMPERATURE,
        prompt_tokens=sum(work.prompt_tokens), new_tokens=sum(work.new_tokens), batching="continuous", budget=budget,
    )  # fmt: skip
    how: dict[str, Any] = {"prompts": work.prompt_tokens, "new_tokens": work.new_tokens}
    book.predict("nano", model.config, options.dtype, budget=budget, seqs=len(work.prompts), **how)
    options.out(f"predictions sealed: sha256 {book.seal()}")

    config = EngineConfig(
        dtype=options.dtype, device=options.device, max_model_len=model.max_len, max_num_seqs=len(work.prompts),
        max_num_batched_tokens=budget,
    )  # fmt: skip
    engine = Engine(model, NoTokenizer(), config, {"detokenizer": NoText})  # type: ignore[arg-type]
    # Every batch size once, so that kernels are compiled and graphs captured before the clock runs.
    generate(engine, Workload("warm", [p[:16] for p in work.prompts], list(range(1, len(work.prompts) + 1))), 0.0)
    samples, first, written = [], [], []
    for _ in progress(range(repeats), "nano"):
        made: list[Request] = []
        samples.append(clock(lambda: made.extend(generate(engine, work, TEMPERATURE)), options.device))  # noqa: B023
        written.append([len(r.output_token_ids) for r in made])
        first.append(sum(r.times["first_token"] - r.times["arrival"] for r in made) / len(made))
    book.measured("nano", samples)
    book.measured("first_token", first, note="mean over the requests, which all arrive at once")
    book.derive("nano.tokens_per_s", "rate", ["nano"], count=sum(work.new_tokens))
    book.derive("nano.share", "share", ["nano"])
    book.derive("nano.residual", "residual", ["nano"])
    check(book, engine, work, written, options)
    return book.finish(ceilings_after(options))


def generate(engine: Engine, work: Workload, temperature: float) -> list[Request]:
    """Run a workload to its end on the engine's step loop. Returns its requests."""
    pairs = zip(work.prompts, work.new_tokens, strict=True)
    params = [(p, SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True)) for p, n in pairs]
    requests = [engine.make_request(p, how) for p, how in params]
    for _ in engine.run(requests):
        pass
    return requests


def check(book: Any, engine: Engine, work: Workload, written: list[list[int]], options: Options) -> None:
    """Every request got its tokens, all blocks came back, and greedy answers of a running batch are the model's."""
    exact = all(counts == work.new_tokens for counts in written)
    book.check("every request got the tokens asked for", exact, f"{sum(work.new_tokens)} tokens")
    assert engine.cache is not None
    engine.cache.check()
    free, total = engine.cache.num_free, engine.cache.pool.num_blocks
    book.check("all blocks are free again", free == total, f"{free} of {total}")
    few = Workload("check", [p[:100] for p in work.prompts[:8]], [12] * len(work.prompts[:8]))
    answers = [r.output_token_ids for r in generate(engine, few, 0.0)]
    gap, best = judge.worst(engine.model, few, answers)
    limit = judge.GAP[options.dtype]
    detail = f"at most {gap:.1e} of the largest logit below the best, allowed {limit:.0e}; {best:.0%} are the best"
    book.check("greedy tokens are the model's", gap <= limit, detail)


def show(record: dict[str, Any]) -> str:
    """The record as text."""
    setup, e, rate = record["setup"], record["results"]["nano"], record["derived"]["nano.tokens_per_s"]
    prediction = record["predictions"]["nano"]["prediction"]
    lines = [
        f"nano-vllm's workload, {setup['model']} ({setup['weights']} weights), {setup['dtype']}, "
        f"{record['device']['name']}: {setup['requests']} requests, {setup['prompt_tokens']:,} tokens in, "
        f"{setup['new_tokens']:,} out",
        f"  {rate['median']:,.0f} tokens/s (p10 {rate['p10']:,.0f}, p90 {rate['p90']:,.0f}) in {seconds(e['median'])}, "
        f"predicted {seconds(prediction['expected'])}, at least {seconds(prediction['lower'])}",
        f"  first token after {seconds(record['results']['first_token']['median'])} on average",
    ]
    lines += [f"  check  {'ok  ' if c['passed'] else 'FAIL'}  {c['name']}: {c['detail']}" for c in record["checks"]]
    return "\n".join(lines)
