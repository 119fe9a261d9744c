"""`LLM`: the offline interface, with vLLM's names and meanings. Three lines give an answer.

>>> from minillm import LLM, SamplingParams
>>> llm = LLM()
>>> llm.chat([{"role": "user", "content": "What is the capital of France?"}])[0].outputs[0].text
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from minillm.engine import Engine, load_engine
from minillm.engine_config import EngineConfig
from minillm.errors import MinillmError, RequestError
from minillm.models.hub import EMBEDDED
from minillm.models.tokenizer import Message, Tokenizer
from minillm.request import CompletionOutput, Request, RequestOutput, SamplingParams, sequence_names

# What of several completions' stamps (seconds of time.perf_counter) is their prompt's.
STAMPS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "arrival": min, "scheduled": min, "first_token": min, "last_token": max, "finished": max,
}  # fmt: skip
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass
class Given:
    """What a request has given so far: its text, its tokens' number, and the sum of the chosen ones' logprobs."""

    text: str = ""
    count: int = 0
    logprob: float = 0.0
    ended: bool = False

    def take(self, request: Request, piece: str, count: int, ended: bool) -> None:
        """A piece of text, with which there are `count` tokens. O(what is new)."""
        self.text += piece
        for i in range(self.count, min(count, len(request.logprobs))):
            self.logprob += request.logprobs[i][request.output_token_ids[i]].logprob
        self.count, self.ended = count, ended


class Face:
    """What `LLM` and `AsyncLLM` share: an engine, and the way from prompts to requests to outputs.

    model  "smollm2-135m" (embedded), a Hugging Face folder, or a hub name (Llama, Qwen2/2.5, Qwen3 dense families)
    dtype, device, kv_cache, quantization, max_model_len and so on: see `EngineConfig`
    parts  your own pieces by name, {"sampler": MySampler(), "allocator": MyAllocator}: see `parts.PARTS`
    """

    def __init__(
        self, model: str | os.PathLike[str] = EMBEDDED, *, parts: Mapping[str, Any] | None = None, **config: Any
    ):
        if unknown := sorted(set(config) - set(EngineConfig.field_names())):
            raise MinillmError(
                f"{type(self).__name__} has no option {unknown[0]!r}; it has {', '.join(EngineConfig.field_names())} "
                "and parts"
            )
        self.model_name = str(model)
        self.engine: Engine = load_engine(model, EngineConfig(**config), parts)

    def shutdown(self) -> None:
        """End the engine's other processes, if there are any (tensor_parallel_size ...). A second time, nothing."""
        self.engine.close()

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def _tokens(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is not None:
                return text, _token_ids(ids)
            if text is None:
                raise RequestError("prompt", f"a dict needs 'prompt' or 'prompt_token_ids', got keys {list(prompt)}")
            return text, self.get_tokenizer().encode(text)
        if isinstance(prompt, str):
            return prompt, self.get_tokenizer().encode(prompt)
        return None, _token_ids(prompt)

    def _requests(
        self, ids: Sequence[int], params: SamplingParams, request_id: str | None = None, **whose: Any
    ) -> list[Request]:
        """One for each of the n completions. Their names are `sequence_names`, or the engine's if there is no id."""
        names = [None] * params.n if request_id is None else sequence_names(request_id, params.n)
        requests: list[Request] = []
        for i, name in enumerate(names):
            sibling = requests[0] if requests else None
            requests.append(self.engine.make_request(ids, params, i, request_id=name, sibling=sibling, **whose))
        return requests

    def _conversations(
        self, conversations: Sequence[Any], add_generation_prompt: bool, variables: Mapping[str, Any] | None
    ) -> list[Prompt]:
        """Each as the chat template writes it."""
        variables = {} if variables is None else variables
        if not isinstance(variables, Mapping) or not all(isinstance(key, str) for key in variables):
            raise RequestError("chat_template_kwargs", f"expected {{name: value}}, got {variables!r:.80}")
        variables = {"add_generation_prompt": add_generation_prompt, **variables}
        tokenizer = self.get_tokenizer()
        texts = [tokenizer.render_chat(c, **variables) for c in conversations]
        return [{"prompt": t, "prompt_token_ids": tokenizer.encode(t, add_special_tokens=False)} for t in texts]

    def _output(self, text: str | None, given: Mapping[Request, Given]) -> RequestOutput:
        """What a prompt has given so far. Copies the token ids, so that they do not grow under their reader."""
        requests = list(given)
        first, outputs = requests[0], []
        for index, (r, so_far) in enumerate(given.items()):
            finish, stop = (r.finish_reason, r.stop_reason) if so_far.ended else (None, None)
            asked = r.params.logprobs is not None
            outputs.append(
                CompletionOutput(
                    index=index, text=so_far.text, token_ids=r.output_token_ids[: so_far.count],
                    finish_reason=finish, stop_reason=stop,
                    cumulative_logprob=so_far.logprob if asked else None,
                    logprobs=r.logprobs[: so_far.count] if asked else None,
                )
            )  # fmt: skip
        metrics, finished = {}, all(g.ended for g in given.values())
        begun = [t for r in requests if (t := r.times.get("first_token", r.times.get("finished"))) is not None]
        if begun:
            metrics["time_to_first_token"] = min(begun) - first.arrival
        if finished:
            metrics["e2e_latency"] = max(r.times["finished"] for r in requests) - first.arrival
        for stamp, pick in STAMPS.items():  # so far: whoever leaves before the end has been somewhere, too
            if (finished or stamp != "finished") and (times := [r.times[stamp] for r in requests if stamp in r.times]):
                metrics[stamp] = pick(times)
        return RequestOutput(
            first.request_id, text, first.prompt_token_ids, outputs, finished, metrics, first.num_cached_tokens
        )


class LLM(Face):
    """The offline interface: everything is asked at once, and the answers come back in order."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        deadline_s: float | Sequence[float | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; results are in the order of the prompts.

        A prompt is text, a list of token ids, or {"prompt": text} or {"prompt_token_ids": ids}. One
        `SamplingParams` serves all prompts; a list gives each its own. Nothing runs when any input is wrong.

        priority (smaller first; read by scheduling_policy="priority"), tenant (whose cached prefixes it may use) and
        deadline_s (seconds after which a request that has not begun never does: finish_reason "abort") are one for
        all, or a list with one for each.
        """
        many = _as_list(prompts)
        each = zip(
            many, _params_for(sampling_params, len(many)), _one_each("priority", priority, int, len(many)),
            _one_each("tenant", tenant, str, len(many)),
            _one_each("deadline_s", deadline_s, (int, float, type(None)), len(many)), strict=True,
        )  # fmt: skip
        jobs = []
        for prompt, params, first, owner, due in each:
            text, ids = self._tokens(prompt)
            jobs.append((text, self._requests(ids, params, priority=first, tenant=owner, deadline_s=due)))
        given = self._run([r for _, group in jobs for r in group], use_tqdm)
        return [self._output(text, {r: given[r] for r in group}) for text, group in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        deadline_s: float | Sequence[float | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation ([{"role": ..., "content": ...}, ...]) or a list of conversations.

        priority, tenant and deadline_s: as in `generate`.
        """
        many = isinstance(messages, Sequence) and bool(messages) and not isinstance(messages[0], Mapping | str)
        conversations: Any = messages if many else [messages]
        prompts = self._conversations(conversations, add_generation_prompt, chat_template_kwargs)
        whose: dict[str, Any] = {"priority": priority, "tenant": tenant, "deadline_s": deadline_s}
        return self.generate(prompts, sampling_params, use_tqdm, **whose)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *,
        priority: int = 0, tenant: str = "", deadline_s: float | None = None,
    ) -> Iterator[str]:  # fmt: skip
        """The text of one completion, piece by piece as it is generated. priority, tenant, deadline_s: see `generate`.

        Input is judged at the call; a request that fails later raises MinillmError from the iterator. One whose
        deadline passed before it began gives no text.
        """
        (params,) = _params_for(sampling_params, 1)
        if params.n != 1:
            raise RequestError("n", f"a stream carries one completion, got n={params.n}; use generate()")
        ids = self._tokens(prompt)[1]
        requests = self._requests(ids, params, priority=priority, tenant=tenant, deadline_s=deadline_s)
        return self._stream(requests)

    def _stream(self, requests: list[Request]) -> Iterator[str]:
        with closing(self.engine.run(requests)) as steps:
            for step in steps:
                for r, delta in step:
                    if delta:
                        yield delta
                    if r.finish_reason == "error":
                        raise MinillmError(str(r.stop_reason))

    def _run(self, requests: list[Request], use_tqdm: bool) -> dict[Request, Given]:
        """Run to the end; what each request gave."""
        from tqdm.auto import tqdm

        pieces: dict[Request, list[str]] = {r: [] for r in requests}
        # Closed at once: an exception out here, such as a notebook's interrupt, would keep the run's blocks held.
        with (
            closing(self.engine.run(requests)) as steps,
            tqdm(total=len(requests), desc="generate", unit="request", disable=not use_tqdm) as bar,
        ):
            tokens = 0
            for step in steps:
                tokens += len(step)
                for r, delta in step:
                    pieces[r].append(delta)
                done = sum(r.finished for r, _ in step)
                if done:
                    bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                    bar.update(done)
        given = {r: Given() for r in requests}
        for r, deltas in pieces.items():
            given[r].take(r, "".join(deltas), len(r.output_token_ids), ended=True)
        return given


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many? A flat list of token ids is one prompt, a list of anything else is many."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array of ids, or of prompts
        prompts = prompts.tolist()
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Sequence):
        raise RequestError("prompts", f"expected text, token ids or a list of them, got {type(prompts).__name__}")
    if prompts and all(isinstance(p, numbers.Integral) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _token_ids(prompt: Any) -> Sequence[int]:
    """A list of token ids, or the .tolist() of an array; `make_request` judges the ids themselves."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Sequence):
        raise RequestError("prompt", f"expected text, token ids or a dict, got {type(prompt).__name__}")
    return list(ids)


def _one_each(name: str, value: Any, kind: type | tuple[type, ...], count: int) -> list[Any]:
    """One value for all prompts, or a list with one for each; `make_request` judges the values themselves."""
    if isinstance(value, kind):
        return [value] * count
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) != count:
        what = "one text" if kind is str else "one number"
        raise RequestError(name, f"expected {what} or a list of {count}, got {value!r:.80}")
    return list(value)


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise RequestError("sampling_params", f"expected SamplingParams or a list of them, got {params!r:.80}")
    if len(params) != count or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(
            "sampling_params",
            f"expected one SamplingParams or a list of {count}, one for each prompt, got {len(params)}",
        )
    return list(params)
