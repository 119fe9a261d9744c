"""A request to /v1/completions and its stream, as `RequestOutput`s: pure, bytes come from elsewhere. Lesson 14.

Token ids come by `return_token_ids`, vLLM's field: a text alone cannot be counted, retried or held against another
engine. What the wire cannot carry is refused here, before anything is sent.
"""

from __future__ import annotations

import json
import time
from dataclasses import fields
from typing import Any

from minillm.cluster.http import Answer
from minillm.cluster.replica import ReplicaBusy, ReplicaLost
from minillm.errors import MinillmError, RequestError
from minillm.request import CompletionOutput, RequestOutput, SamplingParams
from minillm.trace.wire import retry_after

DEFAULTS = SamplingParams()
GONE = ("engine_dead", "shutting_down")  # codes of minillm's servers: this one, or this stream, is at its end
LATE = "deadline_exceeded"


def body_of(
    model: str, prompt: str | list[int], params: SamplingParams, priority: int, deadline_s: float | None
) -> dict[str, Any]:
    """The body. Only what differs from the defaults is in it, so that servers of others know every field.

    params.max_tokens must be a number: to this route, none means 16. Raises RequestError.
    """
    if params.logprobs is not None:
        raise RequestError(
            "logprobs", "a remote replica names tokens by their text there; ask an engine of this process"
        )
    body: dict[str, Any] = {
        "model": model, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True, "max_tokens": params.max_tokens,
    }  # fmt: skip
    for f in fields(params):
        value = getattr(params, f.name)
        if value != getattr(DEFAULTS, f.name) and f.name != "max_tokens":
            body[f.name] = list(value) if isinstance(value, tuple) else value
    if params.logit_bias is not None:
        body["logit_bias"] = {str(k): v for k, v in params.logit_bias.items()}
    if priority != 0:
        body["priority"] = priority
    if deadline_s is not None:
        body["deadline_s"] = deadline_s
    return body


class Completion:
    """What a stream has told so far. `feed` its events, then look at `output`."""

    def __init__(self, name: str, text: str | None, ids: list[int] | None, params: SamplingParams):
        self.name, self.text, self.prompt_ids = name, text, ids or []
        self.choices = [CompletionOutput(i, "", [], None) for i in range(params.n)]
        self.done = False
        self.error: dict[str, Any] | None = None
        self.usage: dict[str, Any] = {}
        self._begun, self._first = time.perf_counter(), 0.0

    @property
    def tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.choices)

    def feed(self, event: str) -> bool:
        """Whether there is something new to show. Raises MinillmError for what is no such stream."""
        if event == "[DONE]":
            self.done = True
            return False
        try:
            chunk = json.loads(event)
            if chunk.get("error"):
                self.error = dict(chunk["error"])
                return False
            self.usage = chunk.get("usage") or self.usage
            taken = [self._take(choice) for choice in chunk.get("choices") or ()]
            return any(taken)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            if isinstance(error, MinillmError):
                raise
            raise MinillmError(f"the replica's stream cannot be read ({error}): {event[:80]!r}") from None

    def _take(self, told: dict[str, Any]) -> bool:
        if (index := told["index"]) not in range(len(self.choices)):
            raise LookupError(f"a choice {index!r:.40}")
        choice, text, ids = self.choices[index], told.get("text") or "", told.get("token_ids")
        if ids is None and text:
            raise MinillmError(
                "the replica gives text without token_ids; its server must know return_token_ids, as vLLM's and "
                "minillm's do"
            )
        self.prompt_ids = told.get("prompt_token_ids") or self.prompt_ids
        if ids and not self._first:
            self._first = time.perf_counter()
        choice.text += text
        choice.token_ids += [int(t) for t in ids or ()]
        if (reason := told.get("finish_reason")) is not None:
            choice.finish_reason, choice.stop_reason = str(reason), told.get("stop_reason")
        return bool(text or ids or reason)

    def abort(self, why: str) -> None:
        """Its deadline has passed, and it never began: as an engine tells it."""
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish_reason, choice.stop_reason = "abort", why
        self.done = True

    def output(self) -> RequestOutput:
        """Copies the token ids, so that they do not grow under their reader."""
        metrics = {"time_to_first_token": self._first - self._begun} if self._first else {}
        if self.done:
            metrics["e2e_latency"] = time.perf_counter() - self._begun
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        choices = [
            CompletionOutput(c.index, c.text, list(c.token_ids), c.finish_reason, c.stop_reason) for c in self.choices
        ]
        return RequestOutput(self.name, self.text, list(self.prompt_ids), choices, self.done, metrics, cached)


def fault(replica: str, error: dict[str, Any], answer: Answer | None = None) -> Exception:
    """What an OpenAI-style error means for who asked. answer: None for one within a stream."""
    message, param, code = str(error.get("message") or "")[:500], error.get("param"), error.get("code")
    status = answer.status if answer is not None else None
    words = message or (f"status {status}" if status else "an error without a message")
    if code == "engine_dead" or (code in GONE and status is None):
        return ReplicaLost(replica, words)
    if status == 429 or (status == 503 and answer is not None):
        assert answer is not None
        return ReplicaBusy(replica, words, retry_after(answer.headers.get("retry-after")))
    if status in (502, 504) and code is None:  # a gateway: nobody is behind it
        return ReplicaLost(replica, words)
    if status is not None and 400 <= status < 500 and status not in (401, 404, 408) and (param or status in (400, 422)):
        field = str(param or "request").partition("[")[0].partition(".")[0]
        return RequestError(field, words.removeprefix(f"{param}: "))
    return MinillmError(f"replica {replica}: {words}")
