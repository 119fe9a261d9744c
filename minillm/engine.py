"""The engine: a model, its memory and a scheduler, put together from a configuration and parts. Lesson 09 completes it.

`make_request` is the door, where input is judged. `run` drives requests to their end. A paged engine has one
`EngineCore` for its whole life, so that requests of any number of callers share its steps; the older kinds of cache
make one for each run, in static groups.
"""

from __future__ import annotations

import contextlib
import copy
import numbers
import os
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from minillm.attention.backends import make_attention
from minillm.attention.invariant import PagedInvariant
from minillm.attention.protocol import AttentionBackend
from minillm.attention.triton import TritonAttention
from minillm.cache.build import make_paged_cache, make_pool, weights_id
from minillm.cache.contiguous import ContiguousKVCache, kv_bytes
from minillm.cache.paged import PagedCache
from minillm.config import ModelConfig
from minillm.core import Delta, EngineCore
from minillm.device import free_memory, pick_device
from minillm.engine_config import EngineConfig
from minillm.errors import MinillmError, RequestError
from minillm.events import EventLog
from minillm.graphs import DecodeGraphs
from minillm.models.detokenizer import IncrementalDetokenizer
from minillm.models.invariant import RowByRow, make_invariant
from minillm.models.tokenizer import Tokenizer
from minillm.models.transformer import Transformer
from minillm.output import OutputProcessor
from minillm.parts import check_parts, check_scheduler, make_part
from minillm.policy import Load, SchedulerPolicy, make_policy
from minillm.request import MAX_SEED, Request, SamplingParams
from minillm.runner import CachedRunner, NaiveRunner, PagedRunner, Runner
from minillm.sampler import Sampler, validate
from minillm.scheduler import Limits, Scheduler, StaticScheduler

if TYPE_CHECKING:
    from minillm.parallel.engine import Spread

PRIORITIES = range(-1000, 1001)


class Engine:
    """One model on one device."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, config: EngineConfig, parts: Mapping[str, Any] | None = None,
        weights_id: str = "", spread: Spread | None = None,
    ):  # fmt: skip
        """parts: see `parts.PARTS`. weights_id: what distinguishes these weights from others, for cached KV.

        spread: the other ranks that hold the rest of the model (lesson 14)."""
        parts = check_parts(parts, config)
        if config.batch_invariant:
            make_invariant(model)  # in place
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self._sampler = self._invariant(parts.get("sampler", Sampler()))
        self.detokenizer = parts.get("detokenizer", IncrementalDetokenizer)
        self.stops = parts.get("stops")
        self.events = EventLog()
        self.policy: SchedulerPolicy = make_policy(config.scheduling_policy, config.priority_ageing_s)
        if "policy" in parts:
            self.policy = parts["policy"]
        # Whether somebody would read a request's priority; a part of the learner's may.
        self.reads_priority = config.scheduling_policy == "priority" or bool({"policy", "scheduler"} & set(parts))
        self.cache: PagedCache | None = None
        self.runner: Runner
        if config.kv_cache == "none":
            self.runner = NaiveRunner(model)
        elif config.kv_cache == "contiguous":
            self.runner = CachedRunner(model, parts.get("kv_cache", ContiguousKVCache))
        else:
            pool = make_pool(model, config) if spread is None else spread.pool
            attention: AttentionBackend = (
                PagedInvariant(pool) if config.batch_invariant
                else make_attention(config.attention_backend, model, pool, parts.get("attention"))
            )  # fmt: skip
            whole = pool if spread is None else spread.whole
            self.cache = make_paged_cache(whole, model, tokenizer, config, parts, attention, self.events, weights_id)
            graphs = None
            if (
                spread is None
                and model.device.type == "cuda"
                and not config.enforce_eager
                and type(attention) is TritonAttention
            ):
                graphs = DecodeGraphs(model, attention, config.max_num_seqs)
            self.runner = (
                PagedRunner(model, self.cache, attention, graphs) if spread is None
                else spread.make_runner(model, self.cache, attention)
            )  # fmt: skip
        self.spread = spread
        self.max_model_len = model.max_len
        # A checkpoint may name an end token that its vocabulary does not have: it never comes.
        self.eos_token_ids = frozenset(t for t in tokenizer.eos_token_ids if 0 <= t < model.config.vocab_size)
        self._make_scheduler = parts.get("scheduler", Scheduler)
        self.core = self._new_core() if config.continuous else None
        self._inboxes: dict[Request, deque[list[Delta]]] = {}  # who waits for which request's text
        self._made = 0  # requests that passed the door: their seeds count on
        self._asked = 0  # and all that came to it: their ids do

    def _new_core(self) -> EngineCore:
        """A step loop. Of a continuous engine there is one; a static run has its own."""
        config, runner = self.config, self.runner
        tokenizer, detokenizer, stops = self.tokenizer, self.detokenizer, self.stops  # without self: no cycle
        make_output = lambda r: OutputProcessor(tokenizer, r, detokenizer, stops)
        if config.continuous:
            assert self.cache is not None
            keep = int(config.watermark * self.cache.pool.num_blocks)
            limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, config.enable_chunked_prefill, keep)
            what = "the cache, the policy, the limits and the event log"
            scheduler = make_part("scheduler", self._make_scheduler, what, self.cache, self.policy, limits, self.events)
            check_scheduler(scheduler)
            budget = config.max_num_batched_tokens if config.enable_chunked_prefill else None
            return EngineCore(scheduler, runner, self._sampler, make_output, self.cache, self.events, budget)
        runner = copy.copy(runner)  # shares the model; cache and rows are made by start()
        static = StaticScheduler(self._fits, runner.start, runner.finish, config.max_num_seqs)
        return EngineCore(static, runner, self._sampler, make_output, self.cache, self.events)

    def close(self) -> None:
        """End the processes of the other ranks, if there are any. A second time, nothing."""
        if self.spread is not None:
            self.spread.close()

    @property
    def sampler(self) -> Any:
        return self._sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self._sampler = self._invariant(sampler)
        if self.core is not None:
            self.core.sampler = self._sampler

    def _invariant(self, sampler: Any) -> Any:
        return RowByRow(sampler) if self.config.batch_invariant else sampler

    # The door ---------------------------------------------------------------------------------------

    def make_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, index: int = 0, *, request_id: str | None = None,
        priority: int = 0, deadline_s: float | None = None, tenant: str = "", sibling: Request | None = None,
    ) -> Request:  # fmt: skip
        """Check everything that can be checked before any work is done. Raises RequestError with the field's name, and
        logs it.

        deadline_s: seconds from now after which the request must not begin. tenant: whose cached prefixes it may use.
        sibling: a request of this engine with the same prompt: its token ids are then shared, and not judged again.
        """
        name = str(self._asked) if request_id is None else request_id
        self._asked += 1
        whose: dict[str, Any] = {"priority": priority, "deadline_s": deadline_s, "tenant": tenant}
        try:
            ids = self._judged(prompt_token_ids) if sibling is None else sibling.prompt_token_ids
            return self._make_request(ids, params, index, name, **whose)
        except RequestError as error:
            self.events.record("refused", name, field=error.field, reason=str(error))
            raise

    def _judged(self, prompt_token_ids: Sequence[int]) -> list[int]:
        ids = list(prompt_token_ids)
        vocab = self.model.config.vocab_size
        if not ids:
            raise RequestError("prompt", "it has no tokens; give at least one character or token id")
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab:  # at C's speed: a server's loop waits
            return ids
        for t in ids:
            if isinstance(t, bool) or not isinstance(t, numbers.Integral) or not 0 <= t < vocab:
                raise RequestError(
                    "prompt", f"token id {t!r} is not in the vocabulary (whole numbers from 0 to {vocab - 1})"
                )
        return [int(t) for t in ids]

    def _make_request(
        self, ids: list[int], params: SamplingParams, index: int, request_id: str, priority: int,
        deadline_s: float | None, tenant: str,
    ) -> Request:  # fmt: skip
        room = self.max_model_len - len(ids)
        if room < 1:
            raise RequestError(
                "prompt",
                f"it has {len(ids)} tokens; the context is {self.max_model_len}, so at most "
                f"{self.max_model_len - 1} leave room for an answer",
            )
        validate(params, self.model.config.vocab_size)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise RequestError(
                "min_tokens", f"{params.min_tokens} asked for, but the context leaves room for {max_tokens} tokens"
            )
        if isinstance(priority, bool) or not isinstance(priority, int) or priority not in PRIORITIES:
            raise RequestError("priority", f"expected a whole number from -1000 to 1000, got {priority!r}")
        if priority and not self.reads_priority:
            raise RequestError(
                "priority", f"got {priority}, but this engine serves in another order; use scheduling_policy='priority'"
            )
        if not isinstance(tenant, str):
            raise RequestError("tenant", f"expected a name, got {tenant!r:.80}")
        now = time.perf_counter()
        if deadline_s is not None and (
            isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 < deadline_s < 1e9
        ):
            raise RequestError("deadline_s", f"expected seconds from now, above 0, got {deadline_s!r}")
        if deadline_s is not None and not self.expires:
            raise RequestError(
                "deadline_s", "nothing in this engine ends what waits too long: that needs batching='continuous', and "
                "of a scheduler of your own waiting.expired(now)"
            )  # fmt: skip
        self._check_memory(len(ids), max_tokens, tenant)
        self._made += 1
        if params.seed is not None:
            seed = (params.seed + index) % (MAX_SEED + 1)
        else:  # unseeded requests differ from each other, and repeat with the engine's seed
            seed = (self.config.seed * 1_000_003 + self._made) % (MAX_SEED + 1)
        request = Request(
            request_id=request_id, prompt_token_ids=ids, params=params, seed=seed,
            eos_token_ids=self.eos_token_ids, max_tokens=max_tokens, times={"arrival": now}, priority=priority,
            tenant=tenant, deadline=None if deadline_s is None else now + deadline_s,
        )  # fmt: skip
        reason = self.policy.admit(request, self.load(tenant))
        if reason is not None and not isinstance(reason, str):
            raise MinillmError(f"parts: the policy's admit must return None or why not, in words, got {reason!r:.80}")
        if reason:
            raise RequestError("request", reason)
        return request

    @property
    def expires(self) -> bool:
        """Whether a request can end because its deadline has passed."""
        return self.core is not None and callable(
            getattr(getattr(self.core.scheduler, "waiting", None), "expired", None)
        )

    def _check_memory(self, prompt: int, max_tokens: int, tenant: str) -> None:
        """A request that can never fit is refused here, so that it never blocks the queue."""
        if self.cache is None:
            need, have = self._kv_bytes(prompt + max_tokens), self._kv_budget()
            if need > have:
                raise RequestError(
                    "max_tokens",
                    f"this request may need {need / 1e9:.1f} GB of KV cache, but {have / 1e9:.1f} GB are free; "
                    "ask for fewer tokens",
                )
            return
        if (blocks := self.cache.blocks_for(prompt + max_tokens - 1)) > (total := self.cache.capacity(tenant)):
            raise RequestError(
                "max_tokens",
                f"this request may need {blocks} blocks of KV cache, and there are {total}; ask for fewer tokens",
            )

    def load(self, tenant: str = "") -> Load:
        """A snapshot for policies: who waits, who runs, and what this tenant's request could get.

        The door reads it while a step may run in another thread: each number was true a moment ago, and they need not
        fit together to the block. No lock is needed for that, since each is one number that the step loop keeps.
        """
        scheduler = self.core.scheduler if self.core is not None else None
        total = self.cache.pool.num_blocks if self.cache else 0
        return Load(
            waiting=scheduler.num_waiting if scheduler else 0, running=len(scheduler.running) if scheduler else 0,
            free_blocks=min(max(self.cache.available(tenant), 0), total) if self.cache else 0, total_blocks=total,
        )  # fmt: skip

    def _kv_bytes(self, tokens: int) -> int:
        return 0 if self.config.kv_cache == "none" else kv_bytes(self.model.config, tokens, self.model.dtype.itemsize)

    def _kv_budget(self) -> int:
        """Half of what is free: activations and everybody else live in the other half."""
        return free_memory(self.model.device) // 2

    def _fits(self, members: Sequence[Request]) -> bool:
        """Whether a static group's memory suffices.

        A contiguous cache needs the longest row for everybody; a paged one the sum of what each may reach.
        """
        if self.cache is not None:
            return sum(self.cache.most_blocks(r) for r in members) <= self.cache.available()
        longest = max(r.num_prompt_tokens + r.max_tokens for r in members)
        return len(members) * self._kv_bytes(longest) <= self._kv_budget()

    # Running requests -----------------------------------------------------------------------------------

    def run(self, requests: Sequence[Request]) -> Generator[list[Delta], None, None]:
        """Run to the end. Yields, after each step, the requests that got a token and the text it released.

        Several runs may be under way at once: in a continuous engine they share its steps. Any may be abandoned: its
        requests are aborted, and their blocks are free. Raises what a failed step raised, if it was these requests'.
        """
        core = self.core or self._new_core()
        inbox: deque[list[Delta]] = deque()
        try:
            for r in requests:
                core.add(r)
                self._inboxes[r] = inbox
            while inbox or not all(r.finished for r in requests):
                if not inbox:  # another run's steps may have filled it
                    self._step(core)
                    continue
                step = inbox.popleft()
                for r, _ in step:
                    if r in core.failures:
                        raise core.failures.pop(r)
                yield step
        finally:  # a step that failed, or a caller that stopped listening: nothing stays held
            for r in requests:
                with contextlib.suppress(Exception):  # a part that fails here must not hide the first fault
                    core.abort(r)
                self._inboxes.pop(r, None)
                core.failures.pop(r, None)

    def _step(self, core: EngineCore) -> None:
        """One step; each run's share goes into its inbox."""
        shares: dict[int, tuple[deque[list[Delta]], list[Delta]]] = {}
        for r, text in core.step():
            inbox = self._inboxes.get(r)
            if inbox is not None:
                shares.setdefault(id(inbox), (inbox, []))[1].append((r, text))
        for inbox, share in shares.values():
            inbox.append(share)


def load_engine(model: str | os.PathLike[str], config: EngineConfig, parts: Mapping[str, Any] | None = None) -> Engine:
    """Find, read and place a model. Raises MinillmError when something about it is wrong."""
    from minillm.models.hub import resolve
    from minillm.models.load import load_transformer

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = resolve(model)
    model_config = ModelConfig.from_folder(folder)
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise MinillmError(f"max_model_len {config.max_model_len} is more than the model's {limit} positions")
    identity = weights_id(folder, exact=config.kv_disk_path is not None)
    if config.world_size > 1:
        from minillm.parallel.engine import load_parallel

        return load_parallel(folder, model_config, config, parts, identity)
    transformer = load_transformer(folder, model_config, config, pick_device(config.device))
    return Engine(transformer, Tokenizer(folder), config, parts, identity)
