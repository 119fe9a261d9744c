"""The engines of the split bench, from a folder or of random weights, and what they are asked. See split.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from minillm.async_llm import AsyncLLM
from minillm.bench.main import _find_kernels
from minillm.bench.nano import NoText, NoTokenizer
from minillm.cluster.transport import listen
from minillm.config import ModelConfig
from minillm.engine import Engine
from minillm.engine_config import EngineConfig
from minillm.errors import MinillmError
from minillm.llm import Face
from minillm.models.transformer import Transformer
from minillm.models.weights import random_weights
from minillm.request import SamplingParams


class RandomFace(Face):
    """A `Face` over random weights of a config: no folder, no tokenizer, no text. The same seed gives the same."""

    def __init__(self, model: Any, *, parts: Any = None, **config: Any):
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in model["config"].items()}
        how, shapes = EngineConfig(**config), ModelConfig(**fields)
        weights = random_weights(shapes, getattr(torch, how.dtype), how.device, model["seed"])
        transformer = Transformer(shapes, weights, how.max_model_len, pack=how.device == "cpu")
        self.model_name = "random"
        tokenizer: Any = NoTokenizer()
        tokenizer.folder = Path("random weights")  # there is none: weights are known by config and seed
        self.engine = Engine(transformer, tokenizer, how, {"detokenizer": NoText}, f"random {model['seed']}")


class RandomLLM(AsyncLLM, RandomFace):
    """`AsyncLLM` on a `RandomFace`."""


def make(model: Any, how: dict[str, Any]) -> AsyncLLM:
    """model: a folder, or {"config", "seed"} for random weights."""
    kind = RandomLLM if isinstance(model, dict) else AsyncLLM
    return kind(model, **how)


def prefill_process() -> None:
    """The prefill engine: one line of JSON on stdin says what to load; says its address; ends when stdin does."""
    from minillm.cluster.prefill_worker import PrefillWorker

    job = json.loads(sys.stdin.readline())
    if job["how"]["device"] != "cpu":
        _find_kernels()
    torch.set_num_threads(job["threads"])
    llm = make(job["model"], job["how"])
    listener = listen("shared-memory", bytes.fromhex(job["key"]))
    worker = PrefillWorker(llm, listener)
    print(json.dumps({"address": listener.address}), flush=True)
    sys.stdin.read()
    worker.close()
    llm.shutdown()


async def stream(llm: AsyncLLM, prompt: list[int], new: int, stamps: list[float]) -> list[int]:
    """The answer; stamps get the time of each step that gave a token of it."""
    tokens: list[int] = []
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    async with contextlib.aclosing(llm.generate({"prompt_token_ids": prompt}, params)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            ids = output.outputs[0].token_ids
            if len(ids) > len(tokens):
                stamps.append(time.perf_counter())
                tokens = list(ids)
    return tokens


async def alone(llm: AsyncLLM, prompt: list[int], new: int) -> tuple[float, float, list[int]]:
    """Seconds to the first token, of a later step, and the answer.

    The step is the mean of the engine's own log: a busy reader gets several tokens at once, and the first ones too.
    """
    stamps: list[float] = []
    begun = time.perf_counter()
    tokens = await stream(llm, prompt, new, stamps)
    steps = [e.time for e in llm.engine.events.of("step") if e.data["rows"]][-len(tokens) :]
    return stamps[0] - begun, (steps[-1] - steps[0]) / (len(tokens) - 1), tokens


async def interrupted(
    llm: AsyncLLM, others: list[list[int]], long: int, prompt: list[int], new: int
) -> tuple[float, list[int], bool]:  # fmt: skip
    """The longest wait of the others for a token until the prompt has its first; its answer; whether they all ran.

    others: prompts of streams that would write `long` tokens, and are left when the prompt has its `new`.
    """
    stamps: list[list[float]] = [[] for _ in others]
    tasks = [asyncio.create_task(stream(llm, p, long, s)) for p, s in zip(others, stamps, strict=True)]
    try:
        while min(map(len, stamps)) < 3:
            if (ended := next((t for t in tasks if t.done()), None)) is not None:
                ended.result()
                raise MinillmError("a stream ended before the prompt came")
            await asyncio.sleep(0.002)
        begun, own = time.perf_counter(), list[float]()
        tokens = await stream(llm, prompt, new, own)
        ran = not any(t.done() for t in tasks)
        worst = 0.0
        for times in stamps:
            for a, b in pairwise(times):
                if b > begun and a < own[0]:
                    worst = max(worst, b - a)
        return worst, tokens, ran
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
