"""A model that cannot be fooled: each KV slot holds the prefix that it stands for. Lessons 06 to 12 test with it.

Whoever hands out blocks, shares, evicts, preempts or swaps them can do one thing wrong: let a request read a slot that
holds something else than its own history. Here every slot holds a number that stands for a whole token prefix, and
`ShadowRunner` compares each slot that a step would read with what it should be. The "model" draws the next token from
the prefix alone, so what a request must generate is known beforehand. No tensors: thousands of steps a second.
`ShadowCore` is the engine's own step loop over such a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minillm.cache.paged import PagedCache
from minillm.core import EngineCore
from minillm.errors import MinillmError
from minillm.events import EventLog
from minillm.policy import FirstCome, SchedulerPolicy
from minillm.request import Request, SamplingParams
from minillm.scheduler import Limits, Scheduler, SchedulerLike

POISON = -1  # what a slot holds before anybody has written it


class ShadowError(MinillmError):
    """A step would have read KV that is not the request's own. The message says which slot, and whose it was."""


class Prefixes:
    """Numbers for prefixes: equal prefixes have equal numbers, and a prefix one token longer is found in one step."""

    def __init__(self) -> None:
        self._number: dict[tuple[int, int], int] = {}
        self._last: list[tuple[int, int]] = [(-1, -1)]  # number -> (number of the prefix before, last token)

    def extend(self, prefix: int, token: int) -> int:
        """The number of `prefix` with `token` behind it; 0 is the empty prefix."""
        key = (prefix, token)
        if key not in self._number:
            self._number[key] = len(self._last)
            self._last.append(key)
        return self._number[key]

    def of(self, tokens: Sequence[int]) -> list[int]:
        """The number of each prefix of tokens, from the first token to all of them."""
        out, at = [], 0
        for t in tokens:
            at = self.extend(at, t)
            out.append(at)
        return out

    def tokens(self, prefix: int) -> list[int]:
        out: list[int] = []
        while prefix > 0:
            prefix, token = self._last[prefix]
            out.append(token)
        return out[::-1]


class ShadowPool:
    """Slots of numbers in the shape of a `KVPool`: [num_blocks + 1][block_size]."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.slots = [[POISON] * block_size for _ in range(num_blocks + 1)]

    block_layout: Any = None

    def read_blocks(self, ids: Sequence[int]) -> list[list[torch.Tensor]]:
        return [[torch.tensor(self.slots[i], dtype=torch.int64)] for i in ids]

    def write_blocks(self, ids: Sequence[int], payloads: Sequence[list[torch.Tensor]]) -> None:
        for i, payload in zip(ids, payloads, strict=True):
            self.slots[i] = payload[0].tolist()


class ShadowRunner:
    """Runs scheduled rows over a `ShadowPool`. `vocab` tokens; the next one is a hash of the prefix.

    reads counts the slots that were checked, computed the tokens of each step.
    """

    def __init__(self, pool: ShadowPool, vocab: int = 50, block_of: str = "block_ids"):
        self.pool, self.vocab = pool, vocab
        self.prefixes = Prefixes()
        self.reads = 0
        self.computed: list[int] = []
        self._known: dict[Request, list[int]] = {}  # numbers of the prefixes of a request's tokens, so far

    def forward(self, requests: Sequence[Request], num_new: Sequence[int] | None = None) -> list[int]:
        """The next token of each request whose last token is computed by this step. Raises ShadowError."""
        counts = [r.num_new_tokens for r in requests] if num_new is None else list(num_new)
        written: set[tuple[int, int]] = set()
        for r, n in zip(requests, counts, strict=True):
            start, bs = r.num_computed_tokens, self.pool.block_size
            if not 1 <= n <= r.num_new_tokens:
                raise ShadowError(f"request {r.request_id} is behind by {r.num_new_tokens} tokens, not {n}")
            if (start + n) > len(r.block_ids) * bs:
                raise ShadowError(f"request {r.request_id} would write token {start + n - 1} behind its last block")
            numbers = self._numbers(r)
            for p in range(start, start + n):
                slot = (r.block_ids[p // bs], p % bs)
                if slot in written or not 1 <= slot[0] <= self.pool.num_blocks:
                    raise ShadowError(f"request {r.request_id}: slot {slot} is written twice in a step, or padding")
                written.add(slot)
                self.pool.slots[slot[0]][slot[1]] = numbers[p]
        tokens = []
        for r, n in zip(requests, counts, strict=True):
            end = r.num_computed_tokens + n
            self._check(r, end)
            r.num_computed_tokens = end
            if end == r.num_tokens:
                tokens.append(self.next_token(self._numbers(r)[end - 1]))
        self.computed.append(sum(counts))
        return tokens

    def next_token(self, prefix: int) -> int:
        return (prefix * 2654435761 >> 7) % self.vocab

    def expected(self, prompt: Sequence[int], count: int) -> list[int]:
        """What a request must generate, run alone."""
        at, out = 0, []
        for t in prompt:
            at = self.prefixes.extend(at, t)
        for _ in range(count):
            out.append(self.next_token(at))
            at = self.prefixes.extend(at, out[-1])
        return out

    def _numbers(self, request: Request) -> list[int]:
        known = self._known.setdefault(request, [])
        for t in request.tokens[len(known) :]:
            known.append(self.prefixes.extend(known[-1] if known else 0, t))
        return known

    def _check(self, request: Request, end: int) -> None:
        numbers, bs = self._numbers(request), self.pool.block_size
        for i in range(0, end, bs):
            block, n = request.block_ids[i // bs], min(bs, end - i)
            held = self.pool.slots[block][:n]
            self.reads += n
            if held != numbers[i : i + n]:
                bad = next(j for j in range(n) if held[j] != numbers[i + j])
                found = "nothing yet" if held[bad] == POISON else f"the prefix {self.prefixes.tokens(held[bad])!r:.60}"
                raise ShadowError(
                    f"request {request.request_id} would read block {block}, slot {bad} as its token {i + bad}, and "
                    f"it holds {found} instead of {self.prefixes.tokens(numbers[i + bad])!r:.60}"
                )

    def start(self, requests: Sequence[Request]) -> None:
        pass

    def finish(self, request: Request) -> None:
        self._known.pop(request, None)


class ShadowCore(EngineCore):
    """An engine over shadows: the real scheduler, cache and step loop, or a learner's. An output only counts tokens.

    blocks, block_size: of the pool. make_scheduler(cache, policy, limits, events) and make_cache(pool, events) build
    the parts; by default they are the engine's own.
    """

    def __init__(
        self, blocks: int = 8, block_size: int = 4, policy: SchedulerPolicy | None = None,
        limits: Limits | None = None, make_cache: Callable[[Any, EventLog], PagedCache] | None = None,
        events: EventLog | None = None, make_scheduler: Callable[..., SchedulerLike] = Scheduler,
    ):  # fmt: skip
        events = EventLog() if events is None else events
        pool = ShadowPool(blocks, block_size)
        self.shadow = ShadowRunner(pool)
        self.kv = PagedCache(pool, events=events) if make_cache is None else make_cache(pool, events)
        self.limits = limits or Limits(max_num_seqs=4, max_num_batched_tokens=8)
        self.policy = policy or FirstCome()
        scheduler = make_scheduler(self.kv, self.policy, self.limits, events)
        runner: Any = _Runner(self.shadow)
        make_output: Any = _Output
        super().__init__(scheduler, runner, _Sampler(), make_output, self.kv, events)
        self.made = 0

    def request(self, prompt: Sequence[int], new: int = 4, **options: Any) -> Request:
        """A request for `new` tokens; it arrives at second 1, 2, 3 ... unless `arrival` says otherwise."""
        self.made += 1
        times = {"arrival": float(options.pop("arrival", self.made))}
        params = SamplingParams(max_tokens=new)
        return Request(str(self.made), list(prompt), params, 0, max_tokens=new, times=times, **options)

    def finish_all(self, limit: int = 10_000) -> None:
        """Step until nobody is left. Raises MinillmError if somebody still is after `limit` steps."""
        for _ in range(limit):
            if not self.has_work:
                return
            self.step()
        raise MinillmError(f"{len(self.outputs)} requests did not end in {limit} steps")

    @property
    def idle(self) -> bool:
        """Whether no request holds a block, and none is lost."""
        self.kv.check()
        return self.kv.num_live == 0 and self.kv.num_free + self.kv.num_cached == self.kv.pool.num_blocks


class _Tokens(list[int]):
    """What the shadow "computes": the tokens themselves stand for the logits."""

    vocab = 0

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.vocab


class _Runner:
    def __init__(self, shadow: ShadowRunner):
        self.shadow = shadow

    def forward(self, requests: Sequence[Request], counts: Sequence[int]) -> _Tokens:
        out = _Tokens(self.shadow.forward(requests, counts))
        out.vocab = self.shadow.vocab
        return out

    def finish(self, request: Request) -> None:
        self.shadow.finish(request)


class _Sampler:
    def sample(self, logits: _Tokens, requests: Sequence[Request]) -> tuple[list[int], list[None]]:
        return list(logits), [None] * len(logits)


class _Output:
    def __init__(self, request: Request):
        self.request = request

    def push(self, token: int) -> str:
        r = self.request
        r.output_token_ids.append(token)
        if len(r.output_token_ids) == r.max_tokens:
            r.finish_reason = "length"
        return ""

    def finish(self) -> str:
        return ""
