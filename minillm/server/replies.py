"""What a client gets: OpenAI's objects, whole or as a stream of chunks, from what the engine gave. Lesson 13.

The engine's outputs are cumulative; a stream is their differences. `chunks` runs once for every token of every stream,
so it builds plain dicts of what is new and nothing else. All deltas together are the whole text, and the logprobs of
all chunks those of the whole reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minillm.models.tokenizer import Tokenizer
from minillm.request import CompletionOutput, RequestOutput
from minillm.server.errors import ApiError
from minillm.server.logprobs import ChatLogprobs, CompletionLogprobs
from minillm.server.protocol import Generation

ENDS = ("stop", "length")  # OpenAI's finish reasons; "error" and "abort" are faults and not ends


class _Choice:
    """How much of one choice has been sent."""

    __slots__ = ("characters", "ended", "logprobs", "tokens")

    def __init__(self, logprobs: ChatLogprobs | CompletionLogprobs | None):
        self.characters = self.tokens = 0
        self.ended = False
        self.logprobs = logprobs

    def take(self, output: CompletionOutput) -> tuple[str, dict[str, Any] | None]:
        """The text and the logprobs that came since the last call."""
        text, self.characters = output.text[self.characters :], len(output.text)
        begin, self.tokens = self.tokens, len(output.token_ids)
        if self.logprobs is None or begin == self.tokens or output.logprobs is None:
            return text, None
        return text, self.logprobs.of(output.token_ids[begin:], output.logprobs[begin:])


class Reply:
    """The reply to one request. Make one for each; use it either for `full` or for `chunks`.

    created: seconds since 1970. Choice j of prompt i has the index i * n + j.

    With return_token_ids (vLLM's) each choice has token_ids, in a chunk those that are new; a token whose text is held
    back has a chunk then. The prompt's are told once: in a chat's reply, or in a completion's choice.
    """

    OBJECT = CHUNK = ""

    def __init__(
        self, request_id: str, model: str, request: Generation, tokenizer: Tokenizer, *,
        created: int = 0, system_fingerprint: str | None = None,
    ):  # fmt: skip
        self._head = {"id": request_id, "object": self.OBJECT, "created": created, "model": model}
        self._tail: dict[str, Any] = {"system_fingerprint": system_fingerprint}
        self._params, self._tokenizer = request.sampling_params(), tokenizer
        # With include_usage, OpenAI writes null into every chunk but the last.
        self._chunk_head = self._head | {"object": self.CHUNK}
        self._chunk_tail = self._tail | ({"usage": None} if request.include_usage else {})
        self._continuous, self._ids = request.continuous_usage, request.return_token_ids
        self._choices: dict[int, list[_Choice]] = {}  # of each prompt, by its number
        self._last: dict[int, RequestOutput] = {}

    def full(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole reply. results: one finished output for each prompt. Raises ApiError when a choice failed."""
        choices = []
        for i, result in enumerate(results):
            if (failed := failure(result)) is not None:
                raise failed
            for j, output in enumerate(result.outputs):
                text, logprobs = self._new_choice().take(output)
                choices.append(
                    {"index": i * self._params.n + j, **self._content(text), "logprobs": logprobs}
                    | {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
                )
                if self._ids:
                    choices[-1]["token_ids"] = list(output.token_ids)
        made = {**self._head, "choices": choices, "usage": usage(results), **self._tail}
        if self._ids:
            for i, result in enumerate(results):
                self._tell_prompt(made, i * self._params.n, result)
        return made

    def chunks(self, i: int, output: RequestOutput) -> list[dict[str, Any]]:
        """What is new of prompt i since the last call. A choice that failed gives its text, and no last chunk."""
        self._last[i] = output
        first = i * self._params.n
        found = []
        choices = self._choices.get(i)
        if choices is None:
            choices = self._choices[i] = [self._new_choice() for _ in output.outputs]
            found = [self._chunk(first + j, opening) for j in range(len(choices)) if (opening := self._opening())]
            for chunk in found if self._ids else ():
                self._tell_prompt(chunk, 0, output)
        for j, (choice, now) in enumerate(zip(choices, output.outputs, strict=True)):
            if choice.ended:
                continue
            begin = choice.tokens
            ids = now.token_ids[begin:] if self._ids else []
            text, logprobs = choice.take(now)
            if text or logprobs or ids:
                found.append(self._chunk(first + j, self._delta(text), logprobs, ids=ids))
                if ids and not begin and not self._opening():
                    self._tell_prompt(found[-1], 0, output)
            if now.finish_reason is not None:
                choice.ended = True
                if now.finish_reason in ENDS:
                    found.append(self._chunk(first + j, self._closing(), None, now.finish_reason, now.stop_reason))
        if self._continuous and found:
            so_far = self._usage()
            for chunk in found:
                chunk["usage"] = so_far
        return found

    def _usage(self) -> dict[str, Any]:
        """Of the whole request, so far."""
        return usage([self._last[i] for i in sorted(self._last)])

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream with include_usage, after all others."""
        return {**self._chunk_head, "choices": [], **self._tail, "usage": self._usage()}

    def _new_choice(self) -> _Choice:
        top = self._params.logprobs
        return _Choice(None if top is None else self._logprobs(top))

    def _chunk(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None, stop_reason: int | str | None = None, ids: Sequence[int] = (),
    ) -> dict[str, Any]:  # fmt: skip
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._ids:
            choice["token_ids"] = list(ids)
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return {**self._chunk_head, "choices": [choice], **self._chunk_tail}

    def _tell_prompt(self, told: dict[str, Any], first: int, result: RequestOutput) -> None:
        """Put a prompt's token ids where its route has them. first: of the choices in `told`, the prompt's first."""
        raise NotImplementedError

    def _logprobs(self, top: int) -> ChatLogprobs | CompletionLogprobs:
        raise NotImplementedError

    def _content(self, text: str) -> dict[str, Any]:
        """Of a choice of the whole reply."""
        raise NotImplementedError

    def _opening(self) -> dict[str, Any] | None:
        """Of the chunk before a choice's first, if there is one."""
        raise NotImplementedError

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _closing(self) -> dict[str, Any]:
        raise NotImplementedError


class ChatReply(Reply):
    """For a ChatCompletionRequest. A stream tells the role first, then deltas, then the finish reason."""

    OBJECT, CHUNK = "chat.completion", "chat.completion.chunk"

    def _tell_prompt(self, told: dict[str, Any], first: int, result: RequestOutput) -> None:
        told["prompt_token_ids"] = list(result.prompt_token_ids)

    def _logprobs(self, top: int) -> ChatLogprobs:
        return ChatLogprobs(self._tokenizer, top)

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _closing(self) -> dict[str, Any]:
        return {"delta": {}}


class CompletionReply(Reply):
    """For a CompletionRequest. A stream tells the text in pieces, then the finish reason."""

    OBJECT = CHUNK = "text_completion"

    def _tell_prompt(self, told: dict[str, Any], first: int, result: RequestOutput) -> None:
        for choice in told["choices"][first : first + self._params.n]:
            choice["prompt_token_ids"] = list(result.prompt_token_ids)

    def _logprobs(self, top: int) -> CompletionLogprobs:  # the sampler reports so many and the chosen one
        hidden = self._tokenizer.special_ids if self._params.skip_special_tokens else frozenset()
        return CompletionLogprobs(self._tokenizer, hidden)

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _opening(self) -> dict[str, Any] | None:
        return None

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _closing(self) -> dict[str, Any]:
        return {"text": ""}


def usage(results: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens in, tokens out. A prompt counts once however many completions it has, as OpenAI bills it."""
    prompt = sum(len(r.prompt_token_ids) for r in results)
    given = sum(len(c.token_ids) for r in results for c in r.outputs)
    cached = [r.num_cached_tokens for r in results if r.num_cached_tokens is not None]
    return {
        "prompt_tokens": prompt, "completion_tokens": given, "total_tokens": prompt + given,
        "prompt_tokens_details": {"cached_tokens": sum(cached)} if cached else None,
    }  # fmt: skip


def failure(result: RequestOutput) -> ApiError | None:
    """The error that a choice with finish_reason "error" or "abort" is. The server aborts what did not begin in time,
    and nothing else whose client is still there."""
    for output in result.outputs:
        if output.finish_reason == "abort":
            return too_late(str(output.stop_reason))
        if output.finish_reason == "error":  # its words may be a learner's, or hold a user's text
            return ApiError(500, "the server failed to go on; the fault is in its log", code="internal_error")
    return None


def too_late(why: str) -> ApiError:
    message = f"the request did not begin in time: {why}"
    return ApiError(504, message, param="deadline_s", code="deadline_exceeded")


def tokenize_reply(
    token_ids: Sequence[int], max_model_len: int, tokenizer: Tokenizer, strings: bool = False
) -> dict[str, Any]:
    """vLLM's reply to /tokenize. strings: with each token's spelling."""
    spelled = [tokenizer.id_to_token(t) for t in token_ids] if strings else None
    return {
        "count": len(token_ids), "max_model_len": max_model_len, "tokens": list(token_ids), "token_strs": spelled,
    }  # fmt: skip


def detokenize_reply(token_ids: Sequence[int], tokenizer: Tokenizer) -> dict[str, Any]:
    """vLLM's reply to /detokenize. Raises ApiError for an id that the tokenizer does not have."""
    for i, token in enumerate(token_ids):
        if token >= tokenizer.vocab_size:
            where = f"tokens[{i}]"
            raise ApiError(400, f"{where}: expected at most {tokenizer.vocab_size - 1}, got {token}", param=where)
    return {"prompt": tokenizer.decode(token_ids, skip_special_tokens=False)}
