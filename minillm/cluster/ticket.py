"""What is being handed over, for whom, and in which attempt. Lesson 15.

A ticket is what a prefill engine shows when it asks for room. It is accepted only for the very tokens, in the very
attempt, of the very process: whatever is older is stale, and is dropped.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.cluster.layout import KVLayout
from minillm.errors import MinillmError

MAX_LEASE_S = 3600.0
MAX_NAME = 256  # characters of a request id or an epoch


@dataclass(frozen=True, slots=True)
class Ticket:
    """request_id and attempt are the decode engine's; epoch is the prefill engine's, drawn at its start.

    token_hash: of the tokens whose KV this is, `num_tokens` of them from the beginning. lease_s: seconds after which
    the prefill engine holds nothing for it any more.
    """

    request_id: str
    attempt: int
    epoch: str
    token_hash: str
    num_tokens: int
    layout: KVLayout
    lease_s: float

    def __post_init__(self) -> None:
        for name in ("request_id", "epoch", "token_hash"):
            value = getattr(self, name)
            if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
                raise MinillmError(f"a ticket's {name} is a text of 1 to {MAX_NAME} characters, got {value!r:.80}")
        for name, least in (("attempt", 0), ("num_tokens", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 1 << 53:
                raise MinillmError(f"a ticket's {name} is a whole number, at least {least}, got {value!r:.80}")
        lease = self.lease_s
        if type(lease) not in (int, float) or not (math.isfinite(lease) and 0 < lease <= MAX_LEASE_S):
            raise MinillmError(f"a ticket's lease_s is seconds, above 0 and at most {MAX_LEASE_S:g}, got {lease!r:.80}")
        if not isinstance(self.layout, KVLayout):
            raise MinillmError(f"a ticket's layout is a KVLayout, got {type(self.layout).__name__}")

    def to_dict(self) -> dict[str, Any]:
        """JSON values, for a message."""
        held = {name: getattr(self, name) for name in self.__slots__}
        return held | {"layout": self.layout.to_dict()}

    @classmethod
    def from_dict(cls, said: Any) -> Ticket:
        """Of what another process says. Raises MinillmError with what is missing, unknown or impossible."""
        if not isinstance(said, Mapping) or set(said) != set(cls.__slots__):
            got = ", ".join(sorted(map(str, said))) if isinstance(said, Mapping) else type(said).__name__
            raise MinillmError(f"a ticket has {', '.join(sorted(cls.__slots__))}; got {got:.200}")
        return cls(**{**said, "layout": KVLayout.from_dict(said["layout"])})


def token_hash(ids: Sequence[int]) -> str:
    """SHA-256 over the ids as little-endian 64-bit numbers, as 64 hexadecimal digits. MinillmError for other values."""
    try:
        numbers = array("q", ids)
    except (TypeError, OverflowError) as error:
        raise MinillmError(f"token ids are whole numbers below 2^63: {error}") from None
    if sys.byteorder == "big":
        numbers.byteswap()
    return hashlib.sha256(numbers.tobytes()).hexdigest()


def new_epoch() -> str:
    """Another one at each start of a prefill engine: a ticket of the process before it matches nothing."""
    return secrets.token_hex(8)
