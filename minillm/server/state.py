"""What all routes of one server share: the engine, who may use it, what is counted and traced. Lesson 13."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from minillm.async_llm import AsyncLLM
from minillm.server.byte_bounds import ByteBound
from minillm.server.config import ServerConfig
from minillm.server.door import Door
from minillm.server.errors import ApiError
from minillm.server.http import Bodies
from minillm.server.lifecycle import Lifecycle
from minillm.server.metrics import Metrics
from minillm.server.tenants import Tenants
from minillm.server.tracing import Traces

if TYPE_CHECKING:
    from minillm.models.tokenizer import Tokenizer
    from minillm.server.protocol import ChatCompletionRequest, TokenizeRequest

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass
class State:
    llm: AsyncLLM
    config: ServerConfig
    model_name: str
    lifecycle: Lifecycle
    tenants: Tenants
    door: Door
    metrics: Metrics
    traces: Traces
    bytes: ByteBound | None
    bodies: Bodies
    created: int  # Unix seconds: when this server began to serve its model
    timeline: Any = None  # what the page's picture is drawn from

    @property
    def tokenizer(self) -> Tokenizer:
        return self.llm.get_tokenizer()

    def count_bytes(self, text: str) -> int:
        """What admission may conclude from: bytes that become tokens."""
        return 0 if self.bytes is None else self.bytes.count(text)

    def render(self, body: ChatCompletionRequest | TokenizeRequest) -> str:
        """The conversation of a body as the model's chat template writes it. Raises MinillmError."""
        variables = {**body.chat_template_kwargs, "add_generation_prompt": body.add_generation_prompt}
        return self.tokenizer.render_chat(body.chat_messages() or [], **variables)

    def card(self) -> dict[str, Any]:
        """The model as /v1/models shows it."""
        return {
            "id": self.model_name, "object": "model", "created": self.created, "owned_by": "minillm",
            "max_model_len": self.llm.engine.max_model_len,
        }  # fmt: skip

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(404, f"model: this server serves {self.model_name!r}, not {name[:100]!r}", param="model",
                           code="model_not_found")  # fmt: skip


def model_name(llm: AsyncLLM, config: ServerConfig) -> str:
    """As vLLM: what it was loaded as, unless told otherwise."""
    return config.served_model_name or llm.model_name


def request_id(request: Request) -> str:
    """The client's X-Request-Id, which is then one id through all stages, or a new one. Raises ApiError."""
    given = request.headers.get("x-request-id")
    if given is None:
        return secrets.token_hex(12)
    if REQUEST_ID.fullmatch(given) is None:
        raise ApiError(400, "X-Request-Id: up to 128 letters, digits and . _ : - are taken", param="X-Request-Id")
    return given


def engine_id(request_id: str) -> str:
    """What the engine calls a request, and the timeline with it: fresh each time, and the id is found in it.

    Clients choose ids, and must not hear of each other's by a conflict. No id of theirs has a "~".
    """
    return f"{request_id}~{secrets.token_hex(4)}"
