"""Who is let in: a bounded queue, and a 429 that says when to come back. Lesson 13; its exercise writes `admit`.

Without a bound a queue that fills faster than it drains grows until memory or patience ends, and then everybody's
request is late. A bound turns that into an early no, which costs a client a millisecond. `admit` is a pure function of
what is asked and of a snapshot (rule 8 of docs/source.md): the same code judges a live server and a simulation.

It is asked twice. Before tokenisation with what the bytes prove: B bytes are at least B / (bytes of the longest token)
tokens, so what cannot fit is refused without being tokenised. Then again with the exact number.
"""

from __future__ import annotations

import math
import numbers
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from minillm.roofline.capacity import StepModel

RETRY_S = 1.0  # told while nothing has been measured
MOST_RETRY_S = 600.0


@dataclass(frozen=True)
class Ask:
    """What one request wants. n counts sequences: each has the prompt, and up to max_tokens of its own. Of a request
    with several prompts n counts the sequences of all, and the prompt is their mean (`together`).

    prompt_bytes   of the UTF-8 text that is tokenised (a chat: after its template, which may drop what it likes), as
                   `byte_bounds.ByteBound` counts them; 0 if the prompt came as token ids
    prompt_tokens  None before tokenisation
    max_tokens     None: up to the end of the context
    priority       smaller is served first, where the engine serves by priority
    deadline_s     seconds from now after which it must not begin any more
    """

    prompt_bytes: int = 0
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    n: int = 1
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True)
class Queue:
    """The load at a moment, in sequences and tokens. Requests on their way to the engine are in it.

    running         have a place: they run, or will in the next step
    waiting         have none. Not 0 only while all places are taken
    waiting_tokens  prompt + max_tokens of those that wait
    max_num_seqs    places. Fewer than the option says while memory holds fewer
    tokens_left     what running and waiting have still to compute, if each uses its max_tokens
    drain_rate      tokens a second of recent steps; None until measured

    For `predicted_wait`, and as likely as they can be told instead of at most:
    running_left    of each that runs and comes before the asker: tokens it has still to generate
    decoding        how many of them have computed their prompt
    ahead           sequences that wait and come before the asker (all, unless the engine serves by priority)
    ahead_output    tokens that those will generate
    prefill_left    prompt tokens to compute, of those that run and those ahead: what the prefix cache leaves of them
    costs           what a step costs; None until measured
    step_tokens     most tokens of a step (max_num_batched_tokens); None if unknown
    """

    waiting: int = 0
    waiting_tokens: int = 0
    running: int = 0
    max_num_seqs: int = 1
    tokens_left: int = 0
    drain_rate: float | None = None
    running_left: tuple[float, ...] = ()
    decoding: int = 0
    ahead: int = 0
    ahead_output: float = 0.0
    prefill_left: float = 0.0
    costs: StepModel | None = None
    step_tokens: int | None = None


@dataclass(frozen=True)
class Refusal:
    """A no, as HTTP says it. code: for programs. retry_after_s: seconds; None where trying again is no use."""

    status: int
    message: str
    code: str | None = None
    retry_after_s: float | None = None
    param: str | None = None


class Admission(Protocol):
    """The part that an exercise replaces. Called in the server's event loop: it must be quick, and wait for nothing."""

    def admit(self, ask: Ask, queue: Queue) -> Refusal | None:
        """None: come in. Depends on its arguments alone."""


def least_tokens(num_bytes: int, longest: int | None) -> int:
    """What so many bytes of text prove. longest: bytes of the longest token; without it, nothing."""
    return 0 if longest is None else math.ceil(num_bytes / longest)


def predicted_wait(queue: Queue, n: int = 1, output: float = 0.0) -> float | None:
    """Seconds until the last of n sequences begins, first come, first served. None while nothing has been measured.

    Each place is taken until its stream has generated what is left; those ahead take the places that come free, and
    then the asker does. That is a number of steps, and `queue.costs` turns steps and tokens into seconds. Prompts ahead
    are computed beside the streams, at most `step_tokens` a step. output: tokens that each of the n generates.
    """
    if queue.costs is None:
        return None
    places = max(1, queue.max_num_seqs, queue.running)
    mean = queue.ahead_output / queue.ahead if queue.ahead else 0.0
    free_at = [*queue.running_left, *[0.0] * (places - len(queue.running_left))]
    steps = _begins(free_at, queue.ahead, mean, n, output)
    active: float = min(places, queue.running + queue.ahead + n - 1)
    if queue.step_tokens is not None:
        joining = (queue.decoding + active) / 2  # streams beside the prompts, which become streams one by one
        prompts = queue.prefill_left / max(1, queue.step_tokens - joining)
        if prompts > steps:
            steps, active = prompts, joining
    return queue.costs.seconds(queue.prefill_left, steps * active, steps)


def _begins(free_at: list[float], ahead: int, mean: float, n: int, output: float) -> float:
    """The step in which the last of n begins: `ahead` of equal length go first, each where it is free first."""
    return _filled(_filled(sorted(free_at), ahead, mean), n - 1, output)[0]


def _filled(free_at: list[float], jobs: int, length: float) -> list[float]:
    """When each place is free again, ascending, once so many jobs have taken the one that is free first, each time.

    Nothing is walked through: before place k is free, those in front of it begin ceil(gap / length) jobs each. Then all
    of them are free within one length, and take turns.
    """
    if jobs <= 0 or length <= 0:
        return free_at

    def before(k: int) -> list[int]:
        return [math.ceil((free_at[k] - f) / length) for f in free_at[:k]]

    k = bisect_right(range(1, len(free_at)), jobs, key=lambda k: sum(before(k)))
    begun = before(k)
    turns = sorted([f + c * length for f, c in zip(free_at[:k], begun, strict=True)] + [free_at[k]])
    rounds, more = divmod(jobs - sum(begun), k + 1)
    return sorted([*(f + (rounds + (i < more)) * length for i, f in enumerate(turns)), *free_at[k + 1 :]])


class BoundedQueue:
    """The default. A request may wait while both bounds hold; one that would run at once is never refused by them.

    max_queued_requests  sequences that may wait for a place
    max_queued_tokens    prompt + max_tokens of those that may wait; None for no bound
    max_model_len        tokens of a context, prompt and answer
    longest_token        bytes of the longest token, which bounds a text that has not been tokenised; None if unknown
    default_retry_s      told while nothing has been measured

    An idle server (nobody runs or waits) admits whatever fits the context. So neither a request of more than
    max_queued_tokens nor one of more sequences than there are places is refused for ever.

    Deadlines. What would not begin in time is refused at once, and only if the prediction is confident: it must have
    been measured, and exceed the deadline by `sure` times. It is 429 and not 504: nothing has timed out, nothing was
    computed, and the same request will do later, so a client may send it again after Retry-After. 504 is for one that
    was let in, waited, and expired.
    """

    def __init__(
        self, max_queued_requests: int, max_queued_tokens: int | None = None, *, max_model_len: int,
        longest_token: int | None = None, default_retry_s: float = RETRY_S, sure: float = 2.0,
    ):  # fmt: skip
        self.max_queued_requests, self.max_queued_tokens = max_queued_requests, max_queued_tokens
        self.max_model_len, self.longest_token = max_model_len, longest_token
        self.default_retry_s, self.sure = default_retry_s, sure

    def admit(self, ask: Ask, queue: Queue) -> Refusal | None:
        prompt, output = sizes(ask, self.max_model_len, self.longest_token)
        if (refusal := self._context(ask, prompt)) is not None:
            return refusal
        free = max(0, queue.max_num_seqs - queue.running - queue.waiting)
        waits = max(0, ask.n - free)
        if not waits or not queue.running + queue.waiting:
            return self._in_time(ask, queue, output)
        retry = self._retry(queue, ask.n, output)
        again = f"try again in {math.ceil(retry)} s"
        if queue.waiting + waits > self.max_queued_requests:
            return Refusal(
                429, f"the queue is full: {queue.waiting} sequences wait, this request would add {waits}, and at most "
                f"{self.max_queued_requests} may wait; {again}", "queue_full", retry,
            )  # fmt: skip
        tokens = waits * (prompt + output)
        if self.max_queued_tokens is not None and queue.waiting_tokens + tokens > self.max_queued_tokens:
            about = "" if ask.prompt_tokens is not None else "at least "
            return Refusal(
                429, f"the queue is full: those that wait hold {queue.waiting_tokens} tokens, this request would add "
                f"{about}{tokens} (prompt and max_tokens of {waits}), and at most {self.max_queued_tokens} may wait; "
                f"{again}, or ask for fewer max_tokens", "queue_tokens_full", retry,
            )  # fmt: skip
        return self._in_time(ask, queue, output)

    def _context(self, ask: Ask, prompt: int) -> Refusal | None:
        if prompt < self.max_model_len:
            return None
        has = f"has {prompt}" if ask.prompt_tokens is not None else f"({ask.prompt_bytes} bytes) has at least {prompt}"
        return Refusal(
            400, f"the prompt {has} tokens; the context is {self.max_model_len}, so at most {self.max_model_len - 1} "
            "leave room for an answer", "context_length_exceeded", None, "prompt",
        )  # fmt: skip

    def _retry(self, queue: Queue, n: int, output: int) -> float:
        wait = predicted_wait(queue, n, output)
        return self.default_retry_s if wait is None else min(max(1.0, wait), MOST_RETRY_S)

    def _in_time(self, ask: Ask, queue: Queue, output: int) -> Refusal | None:
        wait = predicted_wait(queue, ask.n, output)
        if ask.deadline_s is None or wait is None or wait <= self.sure * ask.deadline_s:
            return None
        retry = min(max(1.0, wait - ask.deadline_s), MOST_RETRY_S)  # the queue will then be that much shorter
        return Refusal(
            429, f"it would begin in about {wait:.1f} s, and its deadline is {ask.deadline_s:g} s from now; try again "
            f"in {math.ceil(retry)} s, or give it more time", "deadline_too_short", retry, "deadline_s",
        )  # fmt: skip


def sizes(ask: Ask, max_model_len: int, longest_token: int | None = None) -> tuple[int, int]:
    """(prompt tokens, max_tokens) of one sequence of the request: exact, or what the bytes prove.

    The engine cuts max_tokens to what the context leaves, so their sum is at most max_model_len if the prompt fits.
    """
    prompt = least_tokens(ask.prompt_bytes, longest_token) if ask.prompt_tokens is None else ask.prompt_tokens
    room = max(0, max_model_len - prompt)
    return prompt, room if ask.max_tokens is None else min(ask.max_tokens, room)


def together(asks: Sequence[Ask]) -> Ask:
    """The prompts of one request as one Ask: so many sequences, each with the mean prompt. All are text, or none is."""
    if len(asks) == 1:
        return asks[0]
    mean = lambda values: math.ceil(sum(values) / len(asks))
    tokens = [ask.prompt_tokens for ask in asks if ask.prompt_tokens is not None]
    return replace(
        asks[0], prompt_bytes=mean(ask.prompt_bytes for ask in asks), n=sum(ask.n for ask in asks),
        prompt_tokens=mean(tokens) if tokens else None,
    )  # fmt: skip


def judged_admit(admission: Admission, ask: Ask, queue: Queue) -> Refusal | None:
    """`admit` of what may be a learner's: if it raises, or returns something else, that is 500 and names the part."""
    try:
        answer: object = admission.admit(ask, queue)
    except Exception as error:
        return _failed(f"it raised {type(error).__name__}: {error!s:.200}")
    if answer is None:
        return None
    if not isinstance(answer, Refusal):
        return _failed(f"admit must return None or a Refusal, got {_short(answer)}")
    if isinstance(answer.status, bool) or not isinstance(answer.status, int) or not 400 <= answer.status <= 599:
        return _failed(f"a Refusal's status must be from 400 to 599, got {_short(answer.status)}")
    if not isinstance(answer.message, str) or not answer.message:
        return _failed(f"a Refusal's message must say why in words, got {_short(answer.message)}")
    for name in ("code", "param"):
        if not isinstance(getattr(answer, name), str | None):
            return _failed(f"a Refusal's {name} must be text or None, got {_short(getattr(answer, name))}")
    if answer.retry_after_s is not None and not _seconds(answer.retry_after_s):
        return _failed(f"a Refusal's retry_after_s must be seconds, 0 or more, got {_short(answer.retry_after_s)}")
    return answer


def _failed(what: str) -> Refusal:
    return Refusal(500, f"parts: the admission failed: {what}", "admission_failed")


def _seconds(value: object) -> bool:
    try:
        return (
            isinstance(value, numbers.Real)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and float(value) >= 0
        )
    except OverflowError:  # a whole number that no float can hold
        return False


def _short(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # its repr is a learner's too
        return f"a {type(value).__name__}"
