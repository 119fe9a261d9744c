"""Which options belong to which role of a server: both, prefill, decode. Lesson 15."""

from __future__ import annotations

import re
from typing import Any

from minillm.errors import MinillmError
from minillm.server.errors import ApiError

ROLES = ("both", "prefill", "decode")
ADDRESS = re.compile(r"unix:[@/].+")
SPLIT = re.compile(r"([1-9][0-9]?)p([1-9][0-9]?)d")


def judge_roles(config: Any) -> None:
    """Raise MinillmError for options of a `ServerConfig` that its role would ignore, or that it lacks."""
    if config.role not in ROLES:
        raise MinillmError(f"role must be one of {', '.join(ROLES)}, got {config.role!r:.80}")
    if config.split is not None:
        num_prefill(config.split)
        if config.role != "both" or config.prefill:
            raise MinillmError("split starts the prefill servers itself; leave role and prefill out")
    if isinstance(config.prefill, str) or not all(isinstance(a, str) and ADDRESS.fullmatch(a) for a in config.prefill):
        raise MinillmError(
            f"prefill: addresses of prefill servers are unix:@NAME or unix:/PATH, got {config.prefill!r:.80}"
        )
    if config.role == "decode" and not config.prefill:
        raise MinillmError(
            "role decode needs prefill: the kv address that a server of role prefill tells when it is ready. split "
            "1p1d starts both"
        )
    if config.role != "decode" and config.prefill:
        raise MinillmError(f"prefill is read by role decode, and this is role {config.role}")
    if len(set(config.prefill)) != len(config.prefill):
        raise MinillmError("prefill names a server twice")
    if config.kv_address is not None:
        if config.role != "prefill":
            raise MinillmError("kv_address is where a server of role prefill listens; give role prefill with it")
        if not ADDRESS.fullmatch(config.kv_address):
            raise MinillmError(f"kv_address is unix:@NAME or unix:/PATH, got {config.kv_address!r:.80}")
    lease = config.kv_lease_s
    if isinstance(lease, bool) or not isinstance(lease, int | float) or not 0 < lease <= 3600:
        raise MinillmError(f"kv_lease_s is seconds, above 0 and at most 3600, got {lease!r:.80}")
    if lease != 30.0 and config.role != "decode" and config.split is None:
        raise MinillmError("kv_lease_s is the decode server's: it needs role decode, or split")
    if config.role == "prefill":
        for name in ("tenants", "trace_file", "otlp_traces_endpoint"):
            if getattr(config, name) is not None:
                raise MinillmError(f"{name} is about answers to clients, and a server of role prefill gives none")


def num_prefill(split: Any) -> int:
    """Prefill servers of "2p1d". Raises MinillmError."""
    found = SPLIT.fullmatch(split) if isinstance(split, str) else None
    if found is None:
        raise MinillmError(f"split is written as 1p1d, got {split!r:.80}")
    if found[2] != "1":
        raise MinillmError(
            f"split {split}: several decode servers need a router in front of them, which lesson 16 builds; "
            f"{found[1]}p1d is taken"
        )
    return int(found[1])


def prefill_role() -> ApiError:
    """What a prefill server tells clients."""
    return ApiError(403, "this server has the role prefill: it computes prompts for decode servers and answers nobody; "
                    "send the request to a decode server", code="prefill_role")  # fmt: skip
