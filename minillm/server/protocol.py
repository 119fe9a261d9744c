"""What a client may ask: the bodies of the four routes, judged to the last field before any work is done. Lesson 13.

OpenAI's fields with OpenAI's meanings, vLLM's extra ones with vLLM's. A request says what it wants in three places: the
models here (what is honoured), `refused` (what is known and not offered), and their JSON schema, which goes into the
server's OpenAPI. null means "not given" everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from minillm.errors import RequestError
from minillm.request import MAX_LOGPROBS, MAX_SEED, SamplingParams
from minillm.server import fields, refused, schema
from minillm.server.body import kind_of, load_object, path
from minillm.server.errors import ApiError

T = TypeVar("T", bound="Body")


def parse_body(raw: bytes, kind: type[T]) -> T:
    """The request in a body. Raises ApiError(400) with the field's path, and nothing else, whatever the bytes are."""
    body = load_object(raw)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _first(error) from None


class Body(BaseModel):
    """A JSON object with known fields. One that is neither here nor in `not_offered` is refused with a suggestion."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())
    not_offered: ClassVar[Mapping[str, refused.Refused]] = {}
    inside: ClassVar[str] = ""  # the path of the field that holds it

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, data: Any) -> Any:
        return refused.asked(data, cls.model_fields, cls.not_offered, cls.inside) if isinstance(data, Mapping) else data

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(core)
        schema.completed(handler.resolve_ref_schema(found), cls.not_offered)
        return found

    def api_error(self, error: RequestError) -> ApiError:
        """The engine's complaint about this request, under the name that the client used."""
        name = self._name_of(error.field)
        return refused.wrong(name, str(error).removeprefix(f"{error.field}: "))

    def _name_of(self, field: str) -> str:
        return field


class StreamOptions(Body):
    """How a stream is told."""

    not_offered, inside = refused.STREAM_OPTIONS, "stream_options"
    include_usage: bool = Field(False, description="Send one more chunk with the usage, before [DONE].")
    continuous_usage_stats: bool = Field(
        False, description="Send the usage so far with every chunk (vLLM's); needs include_usage."
    )


Model = Annotated[
    str | None, Field(description="The served model's name, as /v1/models lists it; without it, that model.")
]
TemplateArguments = Annotated[
    dict[str, Any],
    BeforeValidator(fields.template_arguments),
    WithJsonSchema(fields.TEMPLATE_ARGUMENTS_SCHEMA),
]
Messages = Annotated[list[dict[str, str]], BeforeValidator(fields.messages), WithJsonSchema(fields.MESSAGES_SCHEMA)]


class Generation(Body):
    """What both routes that generate have in common."""

    model: Model = None
    n: int = Field(1, ge=1, le=128, description="Completions of each prompt; each has a seed of its own.")
    max_tokens: int | None = Field(None, ge=1, le=fields.MAX_TOKEN, description="At most so many tokens are generated.")
    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=fields.MAX_TOKEN, description="0 or -1 keeps all tokens.")
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="The same seed gives the same text.")
    stop: Annotated[list[str], BeforeValidator(fields.stop), WithJsonSchema(fields.STOP_SCHEMA)] = Field(
        [], description="Strings that end the text."
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: Annotated[
        dict[str, float] | None, BeforeValidator(fields.logit_bias), WithJsonSchema(fields.LOGIT_BIAS_SCHEMA)
    ] = Field(None, description="Token id (as a string) to what is added to its logit.")
    stream: bool = Field(False, description="Send the answer as server-sent events while it is generated.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream: true.")
    stop_token_ids: Annotated[
        list[int], BeforeValidator(fields.stop_token_ids), WithJsonSchema(fields.STOP_TOKENS_SCHEMA)
    ] = Field([], description="Token ids that end it.")
    ignore_eos: bool = Field(False, description="Go on past the end-of-turn token.")
    min_tokens: int = Field(0, ge=0, le=fields.MAX_TOKEN, description="Nothing ends it before so many tokens.")
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int | None = Field(None, ge=-1000, le=1000, description="Smaller is served first.")
    deadline_s: float | None = Field(
        None, gt=0, lt=1e9, description="A request that has not begun after so many seconds never does."
    )
    return_token_ids: bool = Field(
        False,
        description="Give the token ids too: of the prompt (in a stream, with the first chunk) and of the answer.",
    )
    user: str | None = Field(None, max_length=512, description="Who asks; only a salted hash of it is kept.")

    _params: SamplingParams = PrivateAttr()

    @model_validator(mode="after")
    def _judge(self) -> Generation:
        if self.stream_options is not None and self.stream_options.include_usage and not self.stream:
            raise refused.wrong("stream_options", "it belongs to streams; send stream: true, or leave it out")
        if self.continuous_usage and not self.include_usage:
            raise refused.wrong("stream_options.continuous_usage_stats", "it needs include_usage: true")
        try:
            self._params = SamplingParams(
                n=self.n, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p,
                repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty, logit_bias=self.logit_bias, seed=self.seed,  # type: ignore[arg-type]
                stop=tuple(self.stop), include_stop_str_in_output=self.include_stop_str_in_output,
                stop_token_ids=tuple(self.stop_token_ids), ignore_eos=self.ignore_eos, max_tokens=self._max_tokens(),
                min_tokens=self.min_tokens, logprobs=self._logprobs(), skip_special_tokens=self.skip_special_tokens,
            )  # fmt: skip
        except RequestError as error:
            raise self.api_error(error) from None
        return self

    def sampling_params(self) -> SamplingParams:
        return self._params

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def _max_tokens(self) -> int | None:
        return self.max_tokens

    def _logprobs(self) -> int | None:
        raise NotImplementedError


class ChatCompletionRequest(Generation):
    """The body of POST /v1/chat/completions."""

    not_offered = refused.CHAT
    messages: Messages = Field(description="The conversation. developer is read as system.")
    max_completion_tokens: int | None = Field(None, ge=1, le=fields.MAX_TOKEN, description="max_tokens' newer name.")
    logprobs: bool = Field(False, description="Report the log-probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="And so many of the likeliest tokens; needs logprobs: true."
    )
    add_generation_prompt: bool = Field(True, description="End the prompt where the assistant's turn begins.")
    chat_template_kwargs: TemplateArguments = Field({}, description="Variables for the model's chat template.")

    def chat_messages(self) -> list[dict[str, str]]:
        return self.messages

    def _max_tokens(self) -> int | None:
        """None is what the context leaves."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise refused.wrong("max_completion_tokens", f"got {new}, but max_tokens is {old}; send one of the two")
        return old if new is None else new

    def _logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise refused.wrong("top_logprobs", "it needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def _name_of(self, field: str) -> str:
        if field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return {"prompt": "messages", "logprobs": "top_logprobs"}.get(field, field)


class CompletionRequest(Generation):
    """The body of POST /v1/completions."""

    not_offered = refused.COMPLETION
    prompt: Annotated[list[Any], BeforeValidator(fields.prompt), WithJsonSchema(fields.PROMPT_SCHEMA)] = Field(
        description="Text, token ids, or a list of either: one prompt each."
    )
    max_tokens: int | None = Field(16, ge=1, le=fields.MAX_TOKEN, description="At most so many tokens are generated.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Report each token's log-probability, and so many of the likeliest."
    )
    best_of: int | None = Field(None, ge=1, le=128, description="Only as many as n: every completion is returned.")

    @model_validator(mode="after")
    def _all_are_returned(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            why = f"not supported: all {self.n} (n) are returned; ask for more and choose at the client"
            raise refused.wrong("best_of", why, refused.UNSUPPORTED)
        return self

    def prompts(self) -> list[str | list[int]]:
        return self.prompt

    def _logprobs(self) -> int | None:
        return self.logprobs


class TokenizeRequest(Body):
    """The body of POST /tokenize: a prompt or messages, not both."""

    not_offered = refused.TOKENIZE
    model: Model = None
    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = Field(True, description="With messages: end where the assistant's turn begins.")
    chat_template_kwargs: TemplateArguments = Field({}, description="With messages: variables for the chat template.")
    add_special_tokens: bool | None = Field(
        None, description="Without it: true for a prompt, false for messages, whose template writes them."
    )
    return_token_strs: bool = Field(False, description="Give each token's spelling too.")

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise refused.wrong("prompt", "send either prompt or messages")
        return self

    def chat_messages(self) -> list[dict[str, str]] | None:
        return self.messages

    @property
    def special_tokens(self) -> bool:
        """Whether the tokenizer adds its own."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: Model = None
    tokens: Annotated[list[int], BeforeValidator(fields.tokens), WithJsonSchema(fields.TOKENS_SCHEMA)] = Field(
        description="Token ids."
    )


_SAYS: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda c: f"expected at least {c['ge']}",
    "greater_than": lambda c: f"expected more than {c['gt']}",
    "less_than_equal": lambda c: f"expected at most {c['le']}",
    "less_than": lambda c: f"expected less than {c['lt']}",
    "too_long": lambda c: f"expected at most {c['max_length']} items",
    "string_too_long": lambda c: f"expected at most {c['max_length']} characters",
    "int_type": lambda c: "expected a whole number",
    "float_type": lambda c: "expected a number",
    "finite_number": lambda c: "expected a finite number",
    "bool_type": lambda c: "expected true or false",
    "string_type": lambda c: "expected a text",
    "list_type": lambda c: "expected a list",
    "dict_type": lambda c: "expected an object",
    "model_type": lambda c: "expected an object",
}


def _first(error: ValidationError) -> ApiError:
    """The first fault as the client reads it."""
    fault = error.errors(include_url=False)[0]
    place: Any = None
    for step in fault["loc"]:
        place = (place, step)
    where = path(place)
    if fault["type"] == "missing":
        return refused.wrong(where, "it is required")
    say = _SAYS.get(fault["type"])
    words = say(fault.get("ctx", {})) if say else fault["msg"]
    return refused.wrong(where, f"{words}, got {kind_of(fault['input'])}")
