"""`ServerConfig`: what an operator may choose about the server. The engine's are `EngineConfig`'s. Lesson 13."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError
from minillm.server.roles import judge_roles

LEAST_BODY, MOST_BODY = 64 << 10, 1 << 20  # bytes, of the default of max_body_bytes


@dataclass(frozen=True)
class ServerConfig:
    """How the server treats its clients. Names are vLLM's where it has the same thing. Seconds and bytes.

    host, port           where it listens; port 0 takes a free one
    served_model_name    the name clients use; None takes the one that the model was loaded by
    api_key              keys that are let in, one tenant for all; none lets everybody in
    tenants              a TOML file of tenants with keys, classes and quotas (docs/tenants.md), in place of api_key
    admin_key            opens /drain, and everybody's requests on /timeline; None closes them
    max_queued_requests, max_queued_tokens  bounds of those that wait: what comes beyond is told to come later (429)
    request_timeout_s    of a whole answer: then it ends with an error (504)
    body_timeout_s       in which a request's body must have come (408)
    max_body_bytes       of a request (413); None: what four contexts of the longest tokens have, 64 KiB to 1 MiB
    grace_s              of a drain: what still runs then is ended with an error
    stall_s              without a step, while there is work, until /ready says no
    send_buffer_bytes    of the kernel, a connection: a reader that stalls fills it, and is paused (connection.py says
                         how many tokens that is)
    max_connections      at once; those beyond are told 503. None: 1,024, or what the limit of open files leaves
    idle_timeout_s       of a connection without a request under way: then it is closed
    trace_file           JSON lines, one a request, without its text
    otlp_traces_endpoint OpenTelemetry collector for the same spans
    hash_salt            of hashes in traces; None draws one at every start, so that they cannot be joined
    role                 "both" computes prompts and answers; "decode" has prompts computed by the servers of `prefill`;
                         "prefill" computes prompts for those, and answers nobody (docs/pd_split.md)
    split                "1p1d": as "decode", and starts the prefill servers itself
    prefill              addresses of prefill servers, as they tell them when they are ready
    kv_address           where a prefill server listens for KV's takers; None draws one
    kv_lease_s           from submitting a prompt until it is computed here after all
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: tuple[str, ...] = ()
    tenants: str | Path | None = None
    admin_key: str | None = None
    max_queued_requests: int = 256
    max_queued_tokens: int = 262_144
    request_timeout_s: float = 600.0
    body_timeout_s: float = 20.0
    max_body_bytes: int | None = None
    grace_s: float = 30.0
    stall_s: float = 30.0
    send_buffer_bytes: int = 16 << 10
    max_connections: int | None = None
    idle_timeout_s: float = 30.0
    trace_file: str | Path | None = None
    otlp_traces_endpoint: str | None = None
    hash_salt: str | None = None
    role: str = "both"
    split: str | None = None
    prefill: tuple[str, ...] = ()
    kv_address: str | None = None
    kv_lease_s: float = 30.0

    def __post_init__(self) -> None:
        keys = (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key)
        object.__setattr__(self, "api_key", keys)
        for key in (*keys, *([] if self.admin_key is None else [self.admin_key])):
            if not isinstance(key, str) or not key.strip():
                raise MinillmError("api_key and admin_key must be texts that are not empty")
        if self.admin_key is not None and self.admin_key in keys:
            raise MinillmError("admin_key must differ from every api_key: it opens more")
        if keys and self.tenants is not None:
            raise MinillmError("api_key and tenants both say who is let in; give one of the two")
        if not isinstance(self.port, int) or isinstance(self.port, bool) or not 0 <= self.port < 65536:
            raise MinillmError(f"port must be a whole number from 0 to 65535, got {self.port!r}")
        for name in ("max_queued_requests", "max_queued_tokens"):
            _number(name, getattr(self, name), int, 0)
        for name in ("max_body_bytes", "send_buffer_bytes", "max_connections"):
            if (value := getattr(self, name)) is not None or name == "send_buffer_bytes":
                _number(name, value, int, 1)
        for name in ("request_timeout_s", "body_timeout_s", "stall_s", "idle_timeout_s"):
            _number(name, getattr(self, name), (int, float), 1e-3)
        _number("grace_s", self.grace_s, (int, float), 0)
        judge_roles(self)

    def body_bytes(self, max_model_len: int, longest_token: int | None) -> int:
        """`max_body_bytes`, or its default: tokens of a context, bytes of the longest token (None if unknown)."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        contexts = MOST_BODY if longest_token is None else 4 * max_model_len * longest_token
        return min(max(LEAST_BODY, contexts), MOST_BODY)

    def __repr__(self) -> str:
        """Without the keys: a config is the first thing that is logged."""
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        shown |= {"api_key": f"<{len(self.api_key)}>", "admin_key": "<set>" if self.admin_key else None}
        shown["hash_salt"] = "<set>" if self.hash_salt else None
        return f"ServerConfig({', '.join(f'{k}={v!r}' for k, v in shown.items())})"


def _number(name: str, value: Any, kind: Any, low: float) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value < 1e12:
        what = "a whole number" if kind is int else "a number"
        raise MinillmError(f"{name} must be {what}, at least {low}, got {value!r}")
