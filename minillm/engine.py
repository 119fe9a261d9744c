"""The engine: requests in, tokens out, one step after the other. Lessons 01 to 03 assemble it.

A step computes logits, samples one token for each running request and hands it to the request's output.
Requests run in static groups here: a group starts together, and the next one waits until its last
member is done. Lesson 09 shows what that costs and replaces it.
"""

from __future__ import annotations

import contextlib
import copy
import numbers
import operator
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

from minillm.attention.backends import make_attention, make_paged_cache
from minillm.attention.triton import TritonAttention
from minillm.cache.blocks import BlockAllocator
from minillm.cache.contiguous import ContiguousKVCache, kv_bytes
from minillm.cache.paged import PagedCache
from minillm.config import EngineConfig, ModelConfig
from minillm.device import free_memory, pick_device, pick_dtype
from minillm.errors import MinillmError, RequestError
from minillm.graphs import DecodeGraphs
from minillm.models.detokenizer import IncrementalDetokenizer
from minillm.models.tokenizer import Tokenizer
from minillm.models.transformer import Transformer
from minillm.output import OutputProcessor
from minillm.request import MAX_SEED, Request, SamplingParams
from minillm.runner import CachedRunner, NaiveRunner, PagedRunner, Runner
from minillm.sampler import NO_TOKEN, Sampler, no_token_error, validate

PARTS = ("sampler", "kv_cache", "detokenizer", "allocator", "attention")
# Parts that only one kind of KV cache calls. With another they would be accepted and ignored, so they are refused.
PART_OF = {"kv_cache": "contiguous", "allocator": "paged", "attention": "paged"}


class Engine:
    """One model on one device. `run` is the step loop; `make_request` is the door, where input is judged."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, config: EngineConfig, parts: Mapping[str, Any] | None = None
    ):
        """parts: a learner's own `sampler` (an object with `sample`), or classes: `detokenizer`; `kv_cache` of a
        contiguous cache; `allocator` (called with the number of blocks) and `attention` (called with the `KVPool`) of a
        paged one.
        """
        if not isinstance(parts or {}, Mapping):
            raise MinillmError(f"parts must be a dict of {', '.join(PARTS)}, got {parts!r:.80}")
        parts = {name: part for name, part in (parts or {}).items() if part is not None}
        if unknown := [name for name in parts if name not in PARTS]:
            raise MinillmError(f"parts: {unknown[0]!r} is not a part of this engine; it has {', '.join(PARTS)}")
        if not callable(getattr(parts.get("sampler", Sampler), "sample", None)):
            raise MinillmError(
                f"parts: the sampler needs a method sample(logits, requests), got {parts['sampler']!r:.80}"
            )
        for name in parts.keys() - {"sampler"}:
            if not callable(parts[name]):
                raise MinillmError(f"parts: {name} must be a class, got {parts[name]!r:.80}")
            if PART_OF.get(name, config.kv_cache) != config.kv_cache:
                raise MinillmError(
                    f"parts: {name} belongs to kv_cache={PART_OF[name]!r}, and this engine has {config.kv_cache!r}, "
                    "which would never call it"
                )
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.sampler = parts["sampler"] if "sampler" in parts else Sampler()
        self.detokenizer = parts.get("detokenizer", IncrementalDetokenizer)
        self.cache: PagedCache | None = None
        self.runner: Runner
        if config.kv_cache == "none":
            self.runner = NaiveRunner(model)
        elif config.kv_cache == "contiguous":
            self.runner = CachedRunner(model, parts.get("kv_cache", ContiguousKVCache))
        else:
            self.cache = make_paged_cache(model, config, parts.get("allocator", BlockAllocator))
            attention = make_attention(config.attention_backend, model, self.cache.pool, parts.get("attention"))
            graphs = None
            if model.device.type == "cuda" and not config.enforce_eager and type(attention) is TritonAttention:
                graphs = DecodeGraphs(model, attention, config.max_num_seqs)
            self.runner = PagedRunner(model, self.cache, attention, graphs)
        self.max_model_len = model.max_len
        # A checkpoint may name an end token that its vocabulary does not have: it never comes.
        self.eos_token_ids = frozenset(t for t in tokenizer.eos_token_ids if 0 <= t < model.config.vocab_size)
        self._made = 0

    # The door ---------------------------------------------------------------------------------------

    def make_request(self, prompt_token_ids: Sequence[int], params: SamplingParams, index: int = 0) -> Request:
        """Check everything that can be checked before any work is done. Raises RequestError with the field's name."""
        ids = list(prompt_token_ids)
        vocab = self.model.config.vocab_size
        if not ids:
            raise RequestError("prompt", "it has no tokens; give at least one character or token id")
        for t in ids:
            if isinstance(t, bool) or not isinstance(t, numbers.Integral) or not 0 <= t < vocab:
                raise RequestError(
                    "prompt", f"token id {t!r} is not in the vocabulary (whole numbers from 0 to {vocab - 1})"
                )
        room = self.max_model_len - len(ids)
        if room < 1:
            raise RequestError(
                "prompt",
                f"it has {len(ids)} tokens; the context is {self.max_model_len}, so at most "
                f"{self.max_model_len - 1} leave room for an answer",
            )
        validate(params, vocab)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise RequestError(
                "min_tokens", f"{params.min_tokens} asked for, but the context leaves room for {max_tokens} tokens"
            )
        if self.cache is not None and (blocks := self.cache.blocks_for(len(ids) + max_tokens - 1)) > (
            total := self.cache.pool.num_blocks
        ):
            raise RequestError(
                "max_tokens",
                f"this request may need {blocks} blocks of KV cache, and there are {total}; ask for fewer tokens",
            )
        need, have = self._kv_bytes(len(ids) + max_tokens), self._kv_budget()
        if self.cache is None and need > have:
            raise RequestError(
                "max_tokens",
                f"this request may need {need / 1e9:.1f} GB of KV cache, but {have / 1e9:.1f} GB are free; "
                "ask for fewer tokens",
            )
        self._made += 1
        if params.seed is not None:
            seed = (params.seed + index) % (MAX_SEED + 1)
        else:  # unseeded requests differ from each other, and repeat with the engine's seed
            seed = (self.config.seed * 1_000_003 + self._made) % (MAX_SEED + 1)
        return Request(
            request_id=str(self._made - 1),
            prompt_token_ids=[int(t) for t in ids],
            params=params,
            seed=seed,
            eos_token_ids=self.eos_token_ids,
            max_tokens=max_tokens,
            times={"arrival": time.perf_counter()},
        )

    def _kv_bytes(self, tokens: int) -> int:
        return 0 if self.config.kv_cache == "none" else kv_bytes(self.model.config, tokens, self.model.dtype.itemsize)

    def _kv_budget(self) -> int:
        """Half of what is free: activations and everybody else live in the other half."""
        return free_memory(self.model.device) // 2

    # The step loop ------------------------------------------------------------------------------------

    def run(self, requests: Sequence[Request]) -> Generator[list[tuple[Request, str]], None, None]:
        """Run to the end. Yields, after each step, the requests that got a token and the text it released.

        All state of a run is its own, so that several may be under way at once and any may be abandoned.
        """
        runner = copy.copy(self.runner)  # shares the model; cache and rows are made by start()
        outputs = {id(r): OutputProcessor(self.tokenizer, r, detokenizer=self.detokenizer) for r in requests}
        for group in self._groups(requests):
            try:
                runner.start(group)
                running = list(group)
                # Prompts one at a time: each is already enough work for the machine. Then everybody together.
                logits = torch.cat([runner.forward([r]) for r in group])
                while True:
                    yield self._sample(logits, running, outputs)
                    done, running = [r for r in running if r.finished], [r for r in running if not r.finished]
                    for r in done:
                        runner.finish(r)
                    if not running:
                        break
                    logits = runner.forward(running)
            finally:  # a step that failed, or a caller that stopped listening: nothing stays held
                for r in group:
                    with contextlib.suppress(Exception):  # a part that fails here must not hide the first fault
                        runner.finish(r)

    def _sample(
        self, logits: torch.Tensor, running: list[Request], outputs: Mapping[int, OutputProcessor]
    ) -> list[tuple[Request, str]]:
        tokens, logprobs = _drawn(self.sampler.sample(logits, running), logits.shape)
        now = time.perf_counter()
        step = []
        for row, r, token, entry in zip(logits, running, tokens, logprobs, strict=True):
            if token == NO_TOKEN:  # this row is no distribution; its request ends, the others go on
                r.finish_reason, r.stop_reason = "error", str(no_token_error(row, r))
                r.times["finished"] = now
                step.append((r, outputs[id(r)].finish()))
                continue
            r.times.setdefault("first_token", now)
            if entry is not None:
                r.logprobs.append(entry)
            step.append((r, outputs[id(r)].push(token)))  # the last delta is complete
            if r.finished:
                r.times["finished"] = now
        return step

    def _groups(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Cut the requests, in order, into groups whose KV fits and that are not too many.

        A contiguous cache needs the longest row for everybody; a paged one the sum of what each may reach.
        """
        budget = self._kv_budget() if self.cache is None else 0

        def fits(members: list[Request]) -> bool:
            if self.cache is not None:
                return sum(self.cache.most_blocks(r) for r in members) <= self.cache.available
            longest = max(r.num_prompt_tokens + r.max_tokens for r in members)
            return len(members) * self._kv_bytes(longest) <= budget

        group: list[Request] = []
        for r in requests:
            if group and (len(group) == self.config.max_num_seqs or not fits([*group, r])):
                yield group
                group = []
            group.append(r)
        if group:
            yield group


def _drawn(result: Any, shape: Sequence[int]) -> tuple[list[int], list[Any]]:
    """What a sampler returned, judged: it may be a learner's. shape is [requests, vocabulary]."""
    count, vocab = shape
    try:
        tokens, logprobs = result
        tokens, logprobs = [operator.index(t) for t in tokens], list(logprobs)
    except (TypeError, ValueError):
        raise MinillmError(
            f"the sampler must return (token ids, logprobs), two lists with an entry a request, got {result!r:.120}"
        ) from None
    if not len(tokens) == len(logprobs) == count:
        raise MinillmError(
            f"the sampler got {count} requests, but returned {len(tokens)} tokens and {len(logprobs)} logprobs"
        )
    if wrong := [t for t in tokens if t != NO_TOKEN and not 0 <= t < vocab]:
        raise MinillmError(f"the sampler drew {wrong[0]}; token ids are whole numbers from 0 to {vocab - 1}")
    return tokens, logprobs


def load_engine(model: str | os.PathLike[str], config: EngineConfig, parts: Mapping[str, Any] | None = None) -> Engine:
    """Find, read and place a model. Raises MinillmError when something about it is wrong."""
    from minillm.models.hub import resolve
    from minillm.models.weights import load_weights
    from minillm.quant import quantize_model

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = resolve(model)
    model_config = ModelConfig.from_folder(folder)
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise MinillmError(f"max_model_len {config.max_model_len} is more than the model's {limit} positions")
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, model_config.dtype, device)
    weights = load_weights(folder, model_config, dtype, device)
    pack = device.type == "cpu" and config.quantization is None  # quantised weights are packed on their own
    transformer = Transformer(model_config, weights, config.max_model_len, pack=pack)
    if config.quantization is not None:
        quantize_model(transformer, config.quantization)
    return Engine(transformer, Tokenizer(folder), config, parts)
