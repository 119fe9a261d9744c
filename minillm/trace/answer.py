"""What comes back for one streamed request, stamped while it comes; `client.py` sends it. Lesson 13.

Chunks of OpenAI's two streams, chat and completions. A chunk counts when it brings text: the one that only names the
role does not, nor those with the finish reason and the usage. When the finish reason came is kept beside them: the last
token of an answer that ends by itself has no text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from minillm.trace.latency import Stamps
from minillm.trace.wire import MOST, Events, Reply, retry_after


class Answer:
    """`hear` what arrives, then `judge`; `stamps` are what was seen."""

    def __init__(self, scheduled: float, sent: float, leave_after: int | None, on_text: Callable[[str], None] | None):
        self.scheduled, self.sent, self.leave_after, self.on_text = scheduled, sent, leave_after, on_text
        self.chunks: list[tuple[float, int]] = []
        self.counted = 0
        self.usage: dict[str, Any] = {}
        self.status: int | None = None
        self.error: str | None = None
        self.retry_after_s: float | None = None
        self.cancelled = self.done = False
        self.finish_reason: str | None = None
        self.finished: float | None = None
        self.request_id = ""
        self._events, self._refusal = Events(), b""

    def hear(self, now: float, reply: Reply, data: bytes) -> bool:
        """New bytes of the answer. True when there is no need for more."""
        if self.status is None:
            self.status = reply.status
            self.retry_after_s = retry_after(reply.headers.get("retry-after"))
            kind = reply.headers.get("content-type", "").partition(";")[0].strip()
            if self.status == 200 and kind != "text/event-stream":
                self.error = f"expected a text/event-stream, got {kind[:60]!r}"
                return True
        if self.status != 200:
            self._refusal += data
            return len(self._refusal) > MOST
        for text in self._events.feed(data):
            self._take(now, text)
        self.cancelled = self.leave_after is not None and self.counted >= self.leave_after and not self.done
        return self.cancelled

    def judge(self) -> None:
        """The answer is over: is it whole?"""
        if self.status not in (200, None):
            self.error = _message(self._refusal) or f"status {self.status}"
        elif not self.done and not self.cancelled and self.error is None:
            self.error = "the stream ended without [DONE]"

    def _take(self, now: float, text: str) -> None:
        if text == "[DONE]":
            self.done = True
            return
        try:
            chunk = json.loads(text)
            if not isinstance(chunk, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError):
            self.error = f"a chunk is no JSON object: {text[:60]!r}"
            return
        if chunk.get("error"):
            self.error = _message(text.encode()) or "an error without a message"
            return
        self.request_id = self.request_id or str(chunk.get("id") or "")
        usage = chunk.get("usage") or {}
        words = ""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or choice  # chat, or completions
            words += delta.get("content") or delta.get("reasoning_content") or delta.get("text") or ""
            if reason := choice.get("finish_reason"):
                self.finish_reason, self.finished = reason, now
        if words:
            new = usage["completion_tokens"] - self.counted if "completion_tokens" in usage else 1
            self.counted += new
            self.chunks.append((now, new))
            if self.on_text is not None:
                self.on_text(words)
        self.usage = usage or self.usage

    def stamps(self) -> Stamps:
        return Stamps(
            scheduled=self.scheduled, sent=self.sent, chunks=tuple(self.chunks), end=time.perf_counter(),
            prompt_tokens=self.usage.get("prompt_tokens"), output_tokens=self.usage.get("completion_tokens"),
            status=self.status, error=self.error, retry_after_s=self.retry_after_s, cancelled=self.cancelled,
            finish_reason=self.finish_reason, request_id=self.request_id, finished=self.finished,
        )  # fmt: skip


def _message(body: bytes) -> str:
    """What an OpenAI-style error says."""
    try:
        return str(json.loads(body)["error"]["message"])[:300]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
