"""minillm and other engines on the same requests, one side at a time, in an order that turns: A B C, C B A, ...

Three workloads (see workloads.py): W1 a mixed load, W2 one stream, W3 a prompt that many share. Every side gets the
same token ids, fresh ones in every round; ratios are taken within a round, so that whatever disturbs the machine
disturbs both. Lessons 09 to 12 use the record.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minillm.bench import account, gguf_files, judge, peers, workloads
from minillm.bench.common import (
    Options,
    ceilings,
    ceilings_after,
    progress,
    random_tokens,
    read_bandwidth,
    recorder,
    synchronize,
)
from minillm.bench.workloads import Workload
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models import hub
from minillm.roofline.evidence import seconds

# What differs between minillm's sides; the rest is what a user gets.
OURS: dict[str, dict[str, Any]] = {
    "minillm": {},
    "minillm-static": {"batching": "static"},
    "minillm-prefix": {"enable_prefix_caching": True},
    "minillm-int4": {"quantization": "int4"},
    "minillm-compiled": {"compile": True},
    "minillm-prefix-compiled": {"enable_prefix_caching": True, "compile": True},
}
SIDES = {
    "W1": ("minillm", "minillm-compiled", "minillm-static", "transformers", "vllm", "llama.cpp"),
    "W2": ("minillm", "minillm-compiled", "minillm-int4", "transformers", "vllm", "llama.cpp", "llama.cpp-q4_1"),
    "W3": (
        "minillm", "minillm-compiled", "minillm-prefix", "minillm-prefix-compiled", "transformers", "vllm",
        "vllm-prefix", "llama.cpp", "llama.cpp-prefix",
    ),
}  # fmt: skip
TURNS = {"W1": 1, "W2": 3, "W3": 1}  # in a round: the short one more often
DECODES = 9  # tokens of each request in a decode step's account


class OurSide:
    """An `LLM`, asked as the peers are."""

    def __init__(self, name: str, folder: Path, options: Options, longest: int):
        from minillm.llm import LLM

        self.about: dict[str, Any] = {"how": OURS[name]}
        self.llm = LLM(
            folder, dtype=options.dtype, device=options.device, max_num_seqs=options.requests, max_model_len=longest,
            **OURS[name],
        )  # fmt: skip
        self.device = options.device

    def run(self, prompts: list[list[int]], new_tokens: list[int]) -> tuple[list[list[int]], float]:
        synchronize(self.device)
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, [greedy(n) for n in new_tokens], use_tqdm=False)
        synchronize(self.device)
        spent = time.perf_counter() - start
        cache = self.llm.engine.cache
        if cache is not None and cache.prefix is not None:  # what this round left behind is not the next one's to evict
            cache.allocator.free(cache.prefix.clear())
        return [list(o.outputs[0].token_ids) for o in outputs], spent

    def close(self) -> None:
        pass


def greedy(new: int) -> Any:
    from minillm.request import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)


def partner(side: str) -> str:
    """Which side of minillm a peer's side is compared with."""
    return {"prefix": "minillm-prefix", "q4_1": "minillm-int4"}.get(side.partition("-")[2], "minillm")


def pairs(name: str, sides: list[str]) -> list[tuple[str, str]]:
    """(ours, the other) of every ratio of a workload."""
    found = [(partner(s), s) for s in sides if not s.startswith("minillm")]
    found += [("minillm", "minillm-static"), ("minillm-int4", "minillm"), ("minillm-prefix", "minillm")]
    found += [("minillm-compiled", "minillm"), ("minillm-prefix-compiled", "minillm-prefix")]
    return [(a, b) for a, b in found if a in sides and b in sides]


def run(options: Options) -> dict[str, Any]:
    """Race on the workloads asked for, over the peers asked for. Returns the record."""
    options.model = options.model or hub.EMBEDDED
    named = peers.named(options.peer or peers.IN_PROCESS)
    names = options.workloads or workloads.NAMES
    rounds = options.repeats or 3
    folder = hub.resolve(options.model)
    config = ModelConfig.from_folder(folder)
    draw = lambda name, turn: workloads.make(name, options, config.vocab_size, turn)
    shapes = {name: draw(name, -1) for name in names}
    longest = max(w.longest for w in shapes.values())
    if longest > config.max_position_embeddings:
        raise MinillmError(f"{options.model} has {config.max_position_embeddings} positions, this needs {longest}")
    quality, sha256 = _quality(options) if "W2" in names else ({}, None)
    compiles = _compiles(options)

    def here(s: str) -> bool:
        if s in OURS:
            return bool(quality) if s == "minillm-int4" else compiles or not s.endswith("-compiled")
        return s.split("-")[0] in named

    sides = {name: [s for s in SIDES[name] if here(s)] for name in names}

    device = ceilings(options)
    batch = max(1, round(max(w.mean_batch for w in shapes.values())))
    book = recorder(
        options, device, weights="checkpoint", repeats=rounds, peers=list(named), sides=sides, quality=quality,
        weights_sha256=sha256,
        turns={n: TURNS[n] for n in names}, decode_batch=batch, order="A B C, C B A, ...; fresh tokens in every turn",
        requests={n: len(w.prompts) for n, w in shapes.items()},
        prompt_tokens={n: sum(w.prompt_tokens) for n, w in shapes.items()},
        new_tokens={n: sum(w.new_tokens) for n, w in shapes.items()},
    )  # fmt: skip
    context = _predict(book, options, config, shapes, sides, batch)
    options.out(f"predictions sealed: sha256 {book.seal()}")

    running: dict[str, Any] = {}
    try:
        for side in dict.fromkeys(s for name in names for s in sides[name]):
            options.out(f"loading {side}")
            running[side] = _start(side, named, folder, options, longest)
        book.record["setup"]["about"] = {side: engine.about for side, engine in running.items()}
        samples, last, parted, wrong = _race(options, running, sides, draw, rounds)
        for key, values in samples.items():
            book.measured(key, values, unit="bytes/s" if key == "read" else "s")
        _derive(book, shapes, sides)
        _account(book, options, running["minillm"].llm, {"single": 1, "batch": batch}, context, rounds)
        _check(book, options, folder, config, running, last, parted, wrong)
    finally:
        for engine in running.values():
            engine.close()
    return book.finish(ceilings_after(options))


def _quality(options: Options) -> tuple[dict[str, Any], str]:
    """What admits the speed of int4 weights (see roofline/gate.py), or nothing; and the SHA-256 of the weights."""
    from minillm.bench.quality import source_of
    from minillm.roofline.gate import admit

    sha256 = source_of(options)[1]
    try:
        return {"int4": admit("int4", sha256, "cpu" if options.on_cpu else "cuda")}, sha256
    except MinillmError as error:
        options.out(str(error))
        return {}, sha256


def _compiles(options: Options) -> bool:
    from minillm.models.compiled import expect_compilation

    try:
        expect_compilation(torch.device(options.device))
    except MinillmError as error:
        options.out(str(error))
        return False
    return True


def _predict(
    book: Any, options: Options, config: ModelConfig, shapes: Mapping[str, Workload], sides: Mapping[str, list[str]],
    batch: int,
) -> int:  # fmt: skip
    """A prediction for each of our sides, and for a decode step alone and in the mean batch; returns their context."""
    from minillm.engine_config import EngineConfig

    for name, work in shapes.items():
        for side in (s for s in sides[name] if s in OURS):
            how: dict[str, Any] = {"prompts": work.prompt_tokens, "new_tokens": work.new_tokens}
            if side != "minillm-static":
                how |= {"budget": EngineConfig.max_num_batched_tokens, "seqs": options.requests}
            if side.startswith("minillm-prefix"):
                how["shared"] = work.shared
            if side == "minillm-int4":
                how["weights_as"] = "int4"
            book.predict(f"{name}.{side}", config, options.dtype, **how)
    mixed = shapes.get("W1", next(iter(shapes.values())))
    context = round(statistics.mean(mixed.prompt_tokens) + statistics.mean(mixed.new_tokens) / 2)
    context = max(1, min(context, max(w.longest for w in shapes.values()) - DECODES - batch))
    for key, rows in (("single", 1), ("batch", batch)):
        book.predict(f"decode.{key}", config, options.dtype, rows=[(1, context + DECODES // 2)] * rows)
    return context


def _start(side: str, named: Mapping[str, str], folder: Path, options: Options, longest: int) -> Any:
    """The engine of a side, loaded; what runs in another process is stopped until its turn."""
    if side in OURS:
        return OurSide(side, folder, options, longest)
    name = side.split("-")[0]
    if name == peers.IN_PROCESS:
        return peers.TransformersPeer(folder, options.torch_dtype, options.device)
    load = {
        "model": str(folder), "dtype": options.dtype, "device": options.device, "threads": torch.get_num_threads(),
        "max_num_seqs": options.requests, "max_model_len": longest, "prefix_caching": side.endswith("-prefix"),
    }  # fmt: skip
    if name == "llama.cpp":
        if options.gguf is None and options.model not in hub.ALIASES:
            raise MinillmError(f"llama.cpp needs the weights of {options.model} as GGUF: give --gguf FILE")
        source = Path(options.gguf).expanduser() if options.gguf else hub.embedded_gguf()
        load["gguf"] = str(source if side.endswith("-q4_1") else gguf_files.in_dtype(source, options.dtype))
        try:
            return peers.start(side, named[name], load | {"extra_buffers": True})
        except (
            MinillmError
        ) as error:  # its AMX kernels are built where the compiler knows them, and may still be refused
            options.out(f"{error}; once more without extra buffers")
            load["extra_buffers"] = False
    return peers.start(side, named[name], load)


def _race(
    options: Options, running: Mapping[str, Any], sides: Mapping[str, list[str]], draw: Any, rounds: int
) -> tuple[dict[str, list[float]], dict[str, Any], dict[str, list[float]], list[str]]:
    """All rounds. Returns the samples, each workload's last tokens by side, the share of tokens each side wrote before
    it parted from minillm, and who wrote another number of tokens than asked.
    """
    samples: dict[str, list[float]] = {key: [] for key in [*(f"{n}.{s}" for n in sides for s in sides[n]), "read"]}
    last: dict[str, Any] = {}
    parted: dict[str, list[float]] = {}
    wrong: list[str] = []
    probe = read_bandwidth(options)
    turns = [(r, name, t) for r in range(-1, rounds) for name in sides for t in range(TURNS[name] if r >= 0 else 1)]
    for turn, (r, name, t) in enumerate(progress(turns, "throughput")):
        work = draw(name, turn)
        answers = {}
        for side in sides[name] if (r + t) % 2 else sides[name][::-1]:
            answers[side], spent = running[side].run(work.prompts, work.new_tokens)
            if list(map(len, answers[side])) != work.new_tokens:
                wrong.append(f"{side} on {name}")
            if r >= 0:  # the first round warms code paths, thread pools and allocators
                samples[f"{name}.{side}"].append(spent)
        if r >= 0:
            samples["read"].append(probe())
        for side, tokens in answers.items():
            parted.setdefault(f"{name}.{side}", []).append(agreement(answers["minillm"], tokens))
        last[name] = (work, answers)
    return samples, last, parted, wrong


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of tokens that come before the first difference of each request."""
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), min(len(x), len(y))) for x, y in zip(ours, theirs)
    ]
    return sum(same) / max(1, sum(map(len, ours)))


def _derive(book: Any, shapes: Mapping[str, Workload], sides: Mapping[str, list[str]]) -> None:
    """Rates, ratios, and shares of the roof: a peer's roof is that of the side of minillm it is compared with."""
    for name, work in shapes.items():
        for side in sides[name]:
            key = f"{name}.{side}"
            book.derive(f"{key}.tokens_per_s", "rate", [key], count=sum(work.new_tokens))
            mine = side if side in OURS else partner(side)
            if f"{name}.{mine}" in book.record["predictions"]:
                book.derive(f"{key}.share", "share", [key], prediction=f"{name}.{mine}")
            if side in OURS:
                book.derive(f"{key}.residual", "residual", [key])
        for ours, other in pairs(name, sides[name]):
            book.derive(f"{name}.{ours}.vs.{other}", "ratio", [f"{name}.{other}", f"{name}.{ours}"])


def decode_steps(llm: Any, prompts: list[list[int]], clocks: Any = None) -> dict[str, float]:
    """Seconds of one decode step in which all prompts take part: "total", and with an open account its terms."""
    requests = [llm.engine.make_request(p, greedy(DECODES + len(prompts))) for p in prompts]
    start, steps, total = 0.0, -1, 0.0  # steps: -1 while a prompt is being computed
    steps_of = llm.engine.run(requests)
    for _ in steps_of:
        if steps < 0:
            if all(r.output_token_ids for r in requests):  # every prompt is computed: from here on all decode
                if clocks is not None:
                    clocks.seconds.clear()
                start, steps = time.perf_counter(), 0
            continue
        steps += 1
        total = time.perf_counter() - start
        if steps == DECODES - 1 or any(r.finished for r in requests):
            break
    if not steps:
        raise MinillmError(f"no step had all {len(prompts)} sequences: the context has no room for {DECODES} tokens")
    spent = {} if clocks is None else {t: clocks.seconds.get(t, 0.0) / steps for t in account.TERMS}
    steps_of.close()
    if clocks is not None:
        spent["glue"] = total / steps - sum(spent.values())
    return spent | {"total": total / steps}


def _account(
    book: Any, options: Options, llm: Any, batches: Mapping[str, int], context: int, repeats: int
) -> None:  # fmt: skip
    """Where a decode step's time goes, alone and in the mean batch: without clocks, then by term with them."""
    import random

    vocab = llm.engine.model.config.vocab_size
    for key, rows in batches.items():
        rng = random.Random(options.seed)
        prompts = [random_tokens(rng, context, vocab) for _ in range(rows)]
        decode_steps(llm, prompts)
        book.measured(f"decode.{key}", [decode_steps(llm, prompts)["total"] for _ in range(repeats)])
        book.derive(f"decode.{key}.share", "share", [f"decode.{key}"])
        book.derive(f"decode.{key}.residual", "residual", [f"decode.{key}"])
        with account.accounting(llm.engine) as clocks:
            spent = [decode_steps(llm, prompts, clocks) for _ in range(repeats)]
        for term in (*account.TERMS, "total"):
            values = [max(s[term], 1e-9) for s in spent]
            book.measured(f"account.{key}.{term}", values, note="instrumented decode step")


def _check(
    book: Any, options: Options, folder: Path, config: ModelConfig, running: Mapping[str, Any],
    last: Mapping[str, Any], parted: Mapping[str, list[float]], wrong: list[str],
) -> None:  # fmt: skip
    """Every side wrote what it was asked for, and it was the model's answer."""
    from minillm.models.transformer import Transformer
    from minillm.models.weights import load_weights

    detail = ", ".join(dict.fromkeys(wrong)) or f"{sum(map(len, parted.values()))} runs"
    book.check("every side wrote every token asked for", not wrong, detail)
    book.record["setup"]["same_tokens_as_minillm"] = {key: statistics.mean(v) for key, v in parted.items()}
    if wrong:
        return  # there is no answer to judge
    longest = max(work.longest for work, _ in last.values())
    weights = load_weights(folder, config, torch.float32, options.device)
    reference = Transformer(config, weights, longest, pack=options.on_cpu)
    limit = judge.GAP[options.dtype]
    for name, (work, answers) in last.items():
        for side, tokens in answers.items():
            model = running[side].llm.engine.model if side == "minillm-int4" else reference
            gap, best = judge.worst(model, work, tokens)
            detail = (
                f"at most {gap:.1e} of the largest logit below the best, allowed {limit:.0e}; {best:.0%} are the best"
            )
            book.check(f"{name}: tokens of {side} are the model's", gap <= limit, detail)
            if options.dtype == "float32" and not side.endswith(("-int4", "-q4_1")):
                share = min(parted[f"{name}.{side}"])
                book.check(f"{name}: tokens of {side} equal minillm's", share == 1, f"{share:.1%} before they part")


def show(record: dict[str, Any]) -> str:
    """The record as text: a table for each workload, then where a decode step's time goes."""
    setup, derived = record["setup"], record["derived"]
    lines = [f"{setup['model']}, {setup['dtype']}, {setup['threads']} threads, greedy, {setup['repeats']} rounds"]
    spread = lambda e, f: f"{e['median']:{f}} ({e['p10']:{f}} to {e['p90']:{f}})"
    for name, sides in setup["sides"].items():
        counts = setup["requests"][name], setup["prompt_tokens"][name], setup["new_tokens"][name]
        lines += ["", "{}: {} requests, {} tokens in, {} out".format(name, *counts)]
        lines.append(f"  {'side':<18}{'tokens/s':>26}{'of the roof':>13}   times as fast")
        for side in sides:
            key = f"{name}.{side}"
            share = f"{derived[f'{key}.share']['median']:.0%}" if f"{key}.share" in derived else "-"
            versus = "; ".join(
                f"{spread(e, '.2f')} {k.removeprefix(f'{key}.vs.')}"
                for k, e in derived.items()
                if k.startswith(f"{key}.vs.")
            )
            lines.append(
                f"  {side:<18}{spread(derived[f'{key}.tokens_per_s'], '.1f'):>26}{share:>13}   {versus}".rstrip()
            )
    for key, rows in (("single", 1), ("batch", setup["decode_batch"])):
        lines += _step_lines(record, key, rows)
    lines += [
        "",
        *(f"  check  {'ok  ' if c['passed'] else 'FAIL'}  {c['name']}: {c['detail']}" for c in record["checks"]),
    ]
    return "\n".join(lines)


def _step_lines(record: dict[str, Any], key: str, rows: int) -> list[str]:
    result, prediction = record["results"][f"decode.{key}"], record["predictions"][f"decode.{key}"]["prediction"]
    lines = [
        "",
        f"decode step of {rows}: {seconds(result['median'])}, predicted {seconds(prediction['expected'])}, "
        f"at least {seconds(prediction['lower'])}",
    ]
    total = record["results"][f"account.{key}.total"]["median"]
    for term in account.TERMS:
        spent = record["results"][f"account.{key}.{term}"]["median"]
        lines.append(f"  {term:<16}{seconds(spent):>10}{spent / total:>8.1%}")
    return [*lines, f"  {'all':<16}{seconds(total):>10}   with the clocks"]
