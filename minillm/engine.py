"""The engine: requests in, tokens out, one step after the other. Lessons 01 to 03 assemble it.

A step computes logits, samples one token for each running request and hands it to the request's output.
Requests run in static groups here: a group starts together, and the next one waits until its last
member is done. Lesson 09 shows what that costs and replaces it.
"""

from __future__ import annotations

import copy
import numbers
import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from minillm.cache.contiguous import ContiguousKVCache, kv_bytes
from minillm.config import EngineConfig, ModelConfig
from minillm.errors import MinillmError, RequestError
from minillm.models.detokenizer import IncrementalDetokenizer
from minillm.models.linear import has_bf16_instructions
from minillm.models.tokenizer import Tokenizer
from minillm.models.transformer import Transformer
from minillm.output import OutputProcessor
from minillm.request import MAX_SEED, Request, SamplingParams
from minillm.runner import CachedRunner, NaiveRunner, Runner
from minillm.sampler import NO_TOKEN, Sampler, no_token_error, validate

PARTS = ("sampler", "kv_cache", "detokenizer")


class Engine:
    """One model on one device. `run` is the step loop; `make_request` is the door, where input is judged."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, config: EngineConfig, parts: Mapping[str, Any] | None = None
    ):
        """parts: a learner's own `sampler` (an object with `sample`), `kv_cache` or `detokenizer` (classes)."""
        if not isinstance(parts or {}, Mapping):
            raise MinillmError(f"parts must be a dict of {', '.join(PARTS)}, got {parts!r:.80}")
        parts = {name: part for name, part in (parts or {}).items() if part is not None}
        if unknown := [name for name in parts if name not in PARTS]:
            raise MinillmError(f"parts: {unknown[0]!r} is not a part of this engine; it has {', '.join(PARTS)}")
        if not callable(getattr(parts.get("sampler", Sampler), "sample", None)):
            raise MinillmError(
                f"parts: the sampler needs a method sample(logits, requests), got {parts['sampler']!r:.80}"
            )
        for name in ("kv_cache", "detokenizer"):
            if name in parts and not callable(parts[name]):
                raise MinillmError(f"parts: {name} must be a class, got {parts[name]!r:.80}")
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.sampler = parts["sampler"] if "sampler" in parts else Sampler()
        self.detokenizer = parts.get("detokenizer", IncrementalDetokenizer)
        self.runner: Runner = (
            NaiveRunner(model)
            if config.kv_cache == "none"
            else CachedRunner(model, parts.get("kv_cache", ContiguousKVCache))
        )
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
        need, have = self._kv_bytes(len(ids) + max_tokens), self._kv_budget()
        if need > have:
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

    def run(self, requests: Sequence[Request]) -> Iterator[list[tuple[Request, str]]]:
        """Run to the end. Yields, after each step, the requests that got a token and the text it released.

        All state of a run is its own, so that several may be under way at once and any may be abandoned.
        """
        runner = copy.copy(self.runner)  # shares the model; cache and rows are made by start()
        outputs = {id(r): OutputProcessor(self.tokenizer, r, detokenizer=self.detokenizer) for r in requests}
        for group in self._groups(requests):
            runner.start(group)
            # Prompts one at a time: each is already enough work for the machine. Then everybody together.
            logits = torch.cat([runner.forward([r]) for r in group])
            running = group
            while True:
                yield self._sample(logits, running, outputs)
                for r in running:
                    if r.finished:
                        runner.finish(r)
                running = [r for r in running if not r.finished]
                if not running:
                    break
                logits = runner.forward(running)

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
        """Cut the requests, in order, into groups whose reserved KV fits and that are not too many."""
        budget = self._kv_budget()
        group: list[Request] = []
        for r in requests:
            longest = max(q.num_prompt_tokens + q.max_tokens for q in (*group, r))
            if group and (
                len(group) == self.config.max_num_seqs or (len(group) + 1) * self._kv_bytes(longest) > budget
            ):
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
    transformer = Transformer(model_config, weights, config.max_model_len, pack=device.type == "cpu")
    return Engine(transformer, Tokenizer(folder), config, parts)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise MinillmError(f"device {name!r} is not known; use 'auto', 'cpu' or 'cuda'") from None
    if device.type not in ("cpu", "cuda"):
        raise MinillmError(f"device {name!r} is not supported; use 'auto', 'cpu' or 'cuda'")
    if device.type == "cpu" and device.index:
        raise MinillmError(f"device {str(name)!r} is not known: there is one 'cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MinillmError(
            f"device {name!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices; use 'cpu'"
        )
    return device


def pick_dtype(asked: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """ "auto" is the checkpoint's dtype, except that a CPU without bf16 instructions computes in fp32."""
    if asked != "auto":
        return getattr(torch, asked)
    if device.type == "cpu" and (checkpoint == "float16" or not has_bf16_instructions()):
        return torch.float32
    return getattr(torch, checkpoint)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: judge by what is installed
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
