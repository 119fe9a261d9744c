"""A request, what it asks for, and what it gives back. Lessons 01 to 03 build this.

There is no prefill phase and no decode phase here. A request holds its tokens (the prompt's, then those
generated) and one counter, `num_computed_tokens`, which chases `num_tokens`. How far the counter is behind is
all that an engine needs to know.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from minillm.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16


@dataclass(frozen=True)
class SamplingParams:
    """What a caller may ask of one generation. Names and meanings follow vLLM's `SamplingParams`.

    Validated when it is made: a value that cannot be honoured raises `RequestError` naming the field.

    n                   completions per prompt (each with its own seed: `seed + index`)
    temperature         0 is greedy; otherwise logits are divided by it
    top_k               keep the k best tokens; 0 or -1 keeps all
    top_p               keep the smallest set whose probability reaches top_p (nucleus; the token that
                        crosses the boundary stays). Holtzman et al., 2020
    min_p               keep tokens at least min_p times as likely as the best one. Nguyen et al., 2024
    repetition_penalty  divide positive and multiply negative logits of seen tokens. Keskar et al., 2019
    presence_penalty    subtract once from the logit of every token already generated (OpenAI)
    frequency_penalty   subtract once per occurrence among the generated tokens (OpenAI)
    logit_bias          token id -> value added to its logit
    seed                with it, a request's sampled tokens depend on nothing but its own tokens
    stop                strings that end the text; the earliest one to be completed wins
    include_stop_str_in_output  keep the stop string in the text
    stop_token_ids      token ids that end generation
    ignore_eos          go on past the end-of-turn token: exactly max_tokens are generated
    max_tokens          None means up to the context limit
    min_tokens          neither EOS nor a stop may end generation before this many tokens
    logprobs            None, or how many of the most likely tokens to report besides the chosen one
    skip_special_tokens leave special tokens out of the text
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # the dataclass is frozen
        stop = self.stop
        put("stop", (stop,) if isinstance(stop, str) else _sequence("stop", stop, "a string or a list of strings"))
        put("stop_token_ids", _sequence("stop_token_ids", self.stop_token_ids, "a list of token ids"))

        _integer("n", self.n, 1, 128)
        _real("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, None)
        put("top_k", max(self.top_k, 0))
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"expected true or false, got {getattr(self, name)!r}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError("stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}")
        for s in self.stop:
            if not isinstance(s, str) or not s:
                raise RequestError("stop", f"expected non-empty strings, got {s!r}")
            if not s.isprintable() and any("\ud800" <= c <= "\udfff" for c in s):
                raise RequestError("stop", f"{s!r} holds half of a surrogate pair, which no text of a model does")
        for t in self.stop_token_ids:
            _integer("stop_token_ids", t, 0, None)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError("logit_bias", f"expected {{token id: value}}, got {self.logit_bias!r:.80}")
            bias = {_token_id(k): v for k, v in self.logit_bias.items()}
            for token, value in bias.items():
                _integer("logit_bias", token, 0, None)
                _real("logit_bias", value, -100.0, 100.0)
            put("logit_bias", bias)
        # From here on plain Python numbers: a NumPy integer overflows where an int does not, and is no JSON.
        for name in ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs"):
            put(name, None if getattr(self, name) is None else int(getattr(self, name)))
        for name in ("temperature", "top_p", "min_p", *_PENALTIES):
            put(name, float(getattr(self, name)))
        put("stop_token_ids", tuple(int(t) for t in self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def replace(self, **changes: Any) -> SamplingParams:
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(self)} | changes)


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _sequence(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    """A list, tuple, set or array as a tuple; None is the empty one."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(name, f"expected {expected}, got {value!r:.80}")
    return tuple(value)


def _token_id(key: Any) -> Any:
    """JSON turns the whole-number keys of an object into strings."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key


def _integer(name: str, value: Any, low: int | None, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(name, f"expected a whole number, got {value!r}")
    _within(name, value, low, high, False)


def _real(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    try:
        finite = not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        finite = False
    if not finite:
        raise RequestError(name, f"expected a finite number, got {value!r:.80}")
    _within(name, value, low, high, open_low)


def _within(name: str, value: Any, low: Any, high: Any, open_low: bool) -> None:
    if (low is not None and (value < low or (open_low and value == low))) or (high is not None and value > high):
        bounds = f"{'above' if open_low else 'at least'} {low}" + ("" if high is None else f" and at most {high}")
        raise RequestError(name, f"expected {bounds}, got {value!r}")


@dataclass
class TokenLogprob:
    """Log-probability of one token: natural log, of the model's own distribution (raw logits)."""

    token_id: int
    logprob: float
    rank: int
    decoded_token: str = ""


class Status(StrEnum):
    """Where a request is. PREEMPTED waits like WAITING, but has begun before."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


def sequence_names(request_id: str, n: int) -> list[str]:
    """What the engine calls the n sequences of a request: "mine", or of several "mine-0", "mine-1"."""
    return [request_id] if n == 1 else [f"{request_id}-{i}" for i in range(n)]


@dataclass(eq=False)
class Request:
    """One sequence being generated. Two requests are the same only if they are one object.

    Invariant: `0 <= num_computed_tokens < num_tokens` whenever an engine may schedule it. KV exists for
    `tokens[:num_computed_tokens]`; a step computes some or all of `tokens[num_computed_tokens:num_tokens]`, and the
    logits of the last one give the next token.

    priority   smaller is served first, as in vLLM
    deadline   seconds on the engine's clock; what is still waiting then never runs
    tenant     whose cached prefixes it may use (lesson 11)
    paused     its reader has stalled: it keeps its blocks and is not scheduled (back-pressure)
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    max_tokens: int = 16
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)  # its block table, in a paged cache
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, TokenLogprob]] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    priority: int = 0
    deadline: float | None = None
    tenant: str = ""
    status: Status = Status.WAITING
    paused: bool = False
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache or a tier at first admission

    @property
    def arrival(self) -> float:
        """Seconds on the engine's clock."""
        return self.times.get("arrival", 0.0)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """How far the counter is behind: the tokens that the next step must compute."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def tokens(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def new_tokens(self) -> list[int]:
        """The last `num_new_tokens` tokens, without building the whole list when only outputs are new."""
        behind = self.num_new_tokens
        return self.output_token_ids[-behind:] if behind <= len(self.output_token_ids) else self.tokens[-behind:]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class CompletionOutput:
    """One completion. `finish_reason` is "stop" (EOS, a stop token or a stop string), "length", "abort" (cancelled, or
    its deadline passed while it waited) or "error" (the model gave no distribution to draw from, or a step failed);
    `stop_reason` is then the explanation.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, TokenLogprob]] | None = None


@dataclass
class RequestOutput:
    """What one prompt gave: vLLM's shape, so that code moves between the two.

    num_cached_tokens  of the prompt, found in the prefix cache or a tier; its first completion's count
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: dict[str, float] = field(default_factory=dict)
    num_cached_tokens: int | None = None
