"""The way in: quotas, streams, admission and the count of who is inside, as one step. Lesson 13.

with door.enter("chatcmpl-1", tenant, ask) as ticket:      # raises ApiError: then nothing is held
    ids = tokenise(...)
    ticket.confirm(len(ids))                               # raises ApiError: what was held is given back at the end
    ...

Judging and counting happen under one lock. Otherwise a thousand simultaneous requests would all be judged against the
same empty queue. A refused request costs its tenant nothing; one that ran costs what was computed for it, whether or
not its client waited for that. A request of several prompts is judged once, as a whole:
one by one, its last prompts would be refused because of its first.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from minillm.errors import MinillmError
from minillm.server.admission import (
    MOST_RETRY_S,
    RETRY_S,
    Admission,
    Ask,
    Queue,
    judged_admit,
    predicted_wait,
    sizes,
    together,
)
from minillm.server.buckets import Quota, Short
from minillm.server.errors import ApiError
from minillm.server.meter import LoadMeter
from minillm.server.tenants import Tenant


@dataclass
class Ticket:
    """What one request holds while it is inside: an ask and an id (for the engine) of each prompt."""

    door: Door
    tenant: Tenant
    asks: list[Ask]
    names: list[str]
    prompt_param: str
    charged: int = 0

    @property
    def sequences(self) -> int:
        return sum(ask.n for ask in self.asks)

    def confirm(self, *prompt_tokens: int, deadline_s: float | None = None) -> None:
        """The exact number of tokens of each prompt is known, and what is left of its time. Judged again; raises
        ApiError."""
        sized = zip(self.asks, prompt_tokens, strict=True)
        self.door._confirm(self, [replace(ask, prompt_tokens=n, deadline_s=deadline_s) for ask, n in sized])


class Door:
    """admission: the policy, which may be a learner's. max_model_len: tokens of a context. longest_token: bytes of the
    longest token, None if unknown (`BoundedQueue`). max_sequences: of one request with several prompts, None for no
    bound: what neither the places nor the queue can hold would be refused for ever, and is so at once."""

    def __init__(
        self, admission: Admission, meter: LoadMeter, *, max_model_len: int, longest_token: int | None = None,
        max_sequences: int | None = None, clock: Callable[[], float] = time.perf_counter,
    ):  # fmt: skip
        self.admission, self.meter, self.clock = admission, meter, clock
        self.max_model_len, self.longest_token, self.max_sequences = max_model_len, longest_token, max_sequences
        self._quotas: dict[str, Quota] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def enter(
        self, request_id: str, tenant: Tenant, asks: Ask | Sequence[Ask], prompt_param: str = "prompt"
    ) -> Iterator[Ticket]:
        """Let a request in, or raise ApiError. asks: one for each of its prompts; they differ in sizes only.
        prompt_param: the field that holds the prompt ("messages").

        At the end of the block the request has left: what it did not use is given back.
        """
        asks = [asks] if isinstance(asks, Ask) else list(asks)
        names = [request_id, *(f"{request_id}.{i}" for i in range(1, len(asks)))]
        ticket = Ticket(self, tenant, asks, names, prompt_param)
        each = [sizes(ask, self.max_model_len, self.longest_token) for ask in asks]
        with self._lock:
            self._check_count(ticket)
            self._judge(ticket, asks)
            self._check_streams(ticket)
            self._charge(ticket, 1, most_tokens(asks, each))
            try:
                self._reserve(ticket, each)
            except MinillmError as error:
                self._quota(tenant).give(1, ticket.charged)
                raise ApiError(409, str(error), code="request_id_in_use") from None
        try:
            yield ticket
        finally:
            self._leave(ticket)

    def count(self, tenant: Tenant) -> None:
        """A request that generates nothing takes one of its tenant's requests a minute, or raises ApiError."""
        short = self._quota(tenant).take(1, 0)
        if short is not None:
            raise self._too_much(short, 0)

    def _confirm(self, ticket: Ticket, asks: list[Ask]) -> None:
        each = [sizes(ask, self.max_model_len) for ask in asks]
        with self._lock:
            self._judge(ticket, asks, ticket.names)
            self._charge(ticket, 0, most_tokens(asks, each))
            for name, (prompt, output) in zip(ticket.names, each, strict=True):
                self.meter.resize(name, prompt, output)
            ticket.asks = asks

    def _reserve(self, ticket: Ticket, each: Sequence[tuple[int, int]]) -> None:
        done = []
        try:
            for name, ask, (prompt, output) in zip(ticket.names, ticket.asks, each, strict=True):
                self.meter.reserve(name, prompt, output, ask.n, ask.tenant, ask.priority)
                done.append(name)
        except MinillmError:
            for name in done:
                self.meter.release(name)
            raise

    def _judge(self, ticket: Ticket, asks: Sequence[Ask], own: Sequence[str] = ()) -> None:
        queue = self.meter.queue(asks[0].priority, own)
        refusal = None
        if len(asks) > 1:  # what its longest prompt could not do on an idle server, the request can never do
            longest = max(asks, key=lambda ask: sizes(ask, self.max_model_len, self.longest_token)[0])
            refusal = judged_admit(self.admission, longest, Queue(max_num_seqs=queue.max_num_seqs))
        refusal = refusal or judged_admit(self.admission, together(asks), queue)
        if refusal is not None:
            param = ticket.prompt_param if refusal.param == "prompt" else refusal.param
            raise ApiError(
                refusal.status, refusal.message, param=param, code=refusal.code, retry_after_s=refusal.retry_after_s
            )

    def _check_count(self, ticket: Ticket) -> None:
        """Raise for more sequences than can ever be inside at once."""
        n, most, prompts = ticket.sequences, ticket.tenant.max_streams, len(ticket.asks)
        whose = "this key may have"
        if prompts > 1 and self.max_sequences is not None and (most is None or self.max_sequences < most):
            most, whose = self.max_sequences, "this server takes"
        if most is not None and n > most:
            param = "n" if prompts == 1 else ticket.prompt_param
            asked = f"{n} asked for" if prompts == 1 else f"{prompts} prompts ask for {n} sequences"
            raise ApiError(400, f"{param}: {asked}, and {whose} {most} at once; ask for fewer", param=param,
                           code="too_many_streams")  # fmt: skip

    def _check_streams(self, ticket: Ticket) -> None:
        most, n, tenant = ticket.tenant.max_streams, ticket.sequences, ticket.tenant.name
        if most is None or (under_way := self.meter.streams(tenant)) + n <= most:
            return
        wait = self._until_ended(tenant, under_way + n - most, self.meter.queue(ticket.asks[0].priority))
        raise ApiError(
            429, f"this key has {under_way} streams under way, this request would add {n}, and it may have {most}; "
            "try again when enough have ended", code="too_many_streams",
            retry_after_s=min(max(RETRY_S, wait), MOST_RETRY_S),
        )  # fmt: skip

    def _until_ended(self, tenant: str, count: int, queue: Queue) -> float:
        """Seconds until so many of a tenant's sequences have ended, as likely as it can be told; 0 if it cannot."""
        if queue.costs is None:
            return 0.0
        begins, ends = predicted_wait(queue) or 0.0, []
        for runs, prompt, output in self.meter.left_of(tenant):
            ends.append((0.0 if runs else begins) + queue.costs.seconds(prompt, output * queue.running, output))
        return sorted(ends)[count - 1]

    def _charge(self, ticket: Ticket, requests: int, tokens: int) -> None:
        """Raise the ticket's reservation to `tokens`, or give back what is too much."""
        short = self._quota(ticket.tenant).take(requests, tokens, held=ticket.charged)
        if short is not None:
            raise self._too_much(short, tokens)
        ticket.charged = tokens

    def _too_much(self, short: Short, tokens: int) -> ApiError:
        bound = f"{short.per_minute:g} {short.which} a minute"
        if math.isinf(short.retry_after_s):
            return ApiError(
                400, f"this request may need {tokens} tokens (prompt, and max_tokens of each of n), and this key has "
                f"{bound}; it can never pass: ask for fewer max_tokens", param="max_tokens", code="rate_limit_tokens",
            )  # fmt: skip
        return ApiError(
            429, f"this key has {bound}; {short.level:.0f} are left, and this request needs {short.asked:g}; try again "
            f"in {short.retry_after_s:.1f} s", code=f"rate_limit_{short.which}", retry_after_s=short.retry_after_s,
        )  # fmt: skip

    def _leave(self, ticket: Ticket) -> None:
        outputs = [self.meter.release(name) for name in ticket.names]
        ran = [(ask.prompt_tokens or 0) + n for ask, n in zip(ticket.asks, outputs, strict=True) if n is not None]
        self._quota(ticket.tenant).give(0 if ran else 1, max(0, ticket.charged - sum(ran)))

    def _quota(self, tenant: Tenant) -> Quota:
        if tenant.name not in self._quotas:
            self._quotas[tenant.name] = Quota(tenant.requests_per_minute, tenant.tokens_per_minute, self.clock)
        return self._quotas[tenant.name]


def most_tokens(asks: Sequence[Ask], each: Sequence[tuple[int, int]]) -> int:
    """What a request may use: each prompt once, and max_tokens of each sequence. each: `sizes` of the asks."""
    return sum(prompt + ask.n * output for ask, (prompt, output) in zip(asks, each, strict=True))
