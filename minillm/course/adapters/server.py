"""Exercise 13's admission and stop strings, as the live server calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.course.adapters.text import StopsPart
from minillm.course.answers import Answers
from minillm.errors import MinillmError
from minillm.server.admission import Ask, Queue, Refusal, sizes

NO_BOUND = 2**62  # in place of None: the exercise knows numbers only


def admission(answers: Answers) -> type[AdmissionPart]:
    """What `make_app(admission=...)` takes, around 13.5's Admission."""
    return mounted_admission(answers.take("13.5", 4, wait=1, admit=2))


def mounted_admission(kind: Any) -> type[AdmissionPart]:
    return type("Admission", (AdmissionPart,), {"kind": staticmethod(kind)})


class AdmissionPart:
    """Called as `BoundedQueue` is. The learner sees dicts; max_tokens is a number, cut to what the context leaves.

    Where nobody knows how long a token can be, bytes prove nothing, and the learner sees none.
    """

    kind: Callable[[int, int, int, int], Any]

    def __init__(
        self, max_queued_requests: int, max_queued_tokens: int | None = None, *, max_model_len: int,
        longest_token: int | None = None,
    ):  # fmt: skip
        self.max_model_len, self.longest_token = max_model_len, longest_token
        self.mine = self.kind(max_queued_requests, NO_BOUND if max_queued_tokens is None else max_queued_tokens,
                              max_model_len, longest_token or NO_BOUND)  # fmt: skip

    def admit(self, ask: Ask, queue: Queue) -> Refusal | None:
        _, max_tokens = sizes(ask, self.max_model_len, self.longest_token)
        said = self.mine.admit(
            {"prompt_bytes": ask.prompt_bytes if self.longest_token else 0, "prompt_tokens": ask.prompt_tokens,
             "max_tokens": max_tokens, "n": ask.n, "deadline_s": ask.deadline_s},
            as_dict(queue),
        )  # fmt: skip
        if said is None:
            return None
        if not isinstance(said, tuple | list) or len(said) != 3:
            raise MinillmError(
                f"Admission.admit must return None or (status, message, retry_after_s), got {said!r:.80}"
            )
        status, message, retry_after_s = said
        fits = status != 400
        return Refusal(status, message, "queue_full" if fits else "context_length_exceeded", retry_after_s,
                       None if fits else "prompt")  # fmt: skip


def as_dict(queue: Queue) -> dict[str, Any]:
    """The load as exercise 13.5 describes it."""
    places, costs = max(1, queue.max_num_seqs, queue.running), queue.costs
    return {
        "running": queue.running, "max_num_seqs": places, "running_left": list(queue.running_left),
        "waiting": queue.waiting, "waiting_tokens": queue.waiting_tokens, "ahead": queue.ahead,
        "ahead_output": queue.ahead_output,
        "step_s": None if costs is None else costs.seconds(0, places),
        "prefill_s": 0.0 if costs is None else costs.seconds(queue.prefill_left, 0, steps=0),
    }  # fmt: skip


def stops(answers: Answers) -> Callable[[Sequence[str], bool], StreamStopsPart]:
    """What `parts["stops"]` takes, around 13.6's StreamStops(stops, include)."""
    return mounted_stops(answers.take("13.6", 2, feed=2, finish=0))


def mounted_stops(kind: Any) -> Callable[[Sequence[str], bool], StreamStopsPart]:
    return lambda stop, include_stop: StreamStopsPart(kind, stop, include_stop)


class StreamStopsPart(StopsPart):
    """The learner's class sees all text, and is told when stops do not count yet. Without stops text passes by."""

    name = "StreamStops"

    def feed(self, text: str, enabled: bool = True) -> str:
        return self._feed(text, enabled)
