"""What a replica is, whatever runs it: an engine that takes requests, and says how it is. Lesson 14 builds it.

Three drivers keep this contract: an engine of this process (in_process.py), a server of this machine that we start
(local_process.py) and any server somewhere (remote.py). Several of them are one again (data_parallel.py). Who decides
where a request goes looks at `ReplicaState`s only: pure data, so that the same decision can be replayed and simulated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from minillm.errors import MinillmError
from minillm.request import RequestOutput, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, {"prompt": ..., "prompt_token_ids": ...}


class ReplicaLost(MinillmError):
    """A replica died, hangs or was ended while a request was under way.

    tokens_sent: how many the caller had got by then. 0: another replica may answer from the beginning.
    """

    def __init__(self, replica: str, why: str, tokens_sent: int = 0):
        super().__init__(f"replica {replica} is lost: {why}")
        self.replica, self.why, self.tokens_sent = replica, why, tokens_sent

    def __str__(self) -> str:
        sent = f"; {self.tokens_sent} tokens of this answer were sent" if self.tokens_sent else ""
        return f"replica {self.replica} is lost: {self.why}{sent}"


class ReplicaBusy(MinillmError):
    """A healthy replica does not take this request now: its queue is full, a quota is used up, it drains.

    retry_after_s: what it said about when to come again, None if nothing. No token has been sent.
    """

    def __init__(self, replica: str, why: str, retry_after_s: float | None = None):
        super().__init__(f"replica {replica} takes nothing now: {why}")
        self.replica, self.why, self.retry_after_s = replica, why, retry_after_s


@dataclass(frozen=True)
class ReplicaState:
    """One replica at a moment: all that a decision may look at. None is unknown: a server of others tells less.

    As the replica tells it:
    alive           its engine lives, and steps go on
    ready           and it takes requests; `why` says what is missing of either
    epoch           drawn at each start: with another one, what was cached there is gone
    waiting         requests in its queue, of all its clients; running: those that hold memory
    waiting_tokens  that those in the queue have to compute first
    free_blocks, cached_blocks, total_blocks  of KV; live = total - free - cached
    steps           that its engine has computed
    age_s           seconds since it was asked

    As this process counts it, and so never stale:
    requests        that this process has there
    outstanding_tokens  of those: prompt tokens until the first token comes, and what max_tokens leaves of the answer
    sent            requests that this process has sent there, ever
    """

    name: str
    alive: bool = True
    ready: bool = True
    why: str = ""
    epoch: str | None = None
    model: str | None = None
    waiting: int | None = None
    running: int | None = None
    waiting_tokens: int | None = None
    free_blocks: int | None = None
    cached_blocks: int | None = None
    total_blocks: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    steps: int | None = None
    age_s: float = 0.0
    requests: int = 0
    outstanding_tokens: int = 0
    sent: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> ReplicaState:
        """Of JSON from outside. Raises MinillmError for what is no state; fields of newer versions are left out."""
        if not isinstance(data, Mapping):
            raise MinillmError(f"a replica's state must be an object, got {type(data).__name__}")
        found = {}
        for f in fields(cls):
            value = data.get(f.name, f.default)
            kind = _KINDS[str(f.type).removesuffix(" | None")]
            fits = isinstance(value, kind) and (bool in kind or not isinstance(value, bool))
            if not fits and not (value is None and str(f.type).endswith("None")):
                raise MinillmError(f"a replica's state: {f.name} must be {f.type}, got {value!r:.60}")
            found[f.name] = value
        return cls(**found)


_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}


class Replica(Protocol):
    """Used from one event loop at a time. `async with replica:` starts and closes it."""

    name: str

    async def start(self) -> None:
        """Until it is ready. Raises MinillmError that says why it never will be. One that was lost may start again."""

    def state(self) -> ReplicaState:
        """As it is known here, without asking."""

    async def refresh(self) -> ReplicaState:
        """Ask it. One that does not answer is not alive; nothing is raised."""

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
        priority: int = 0, tenant: str = "", deadline_s: float | None = None,
    ) -> AsyncIterator[RequestOutput]:  # fmt: skip
        """As `AsyncLLM.generate`: the output so far, again and again. Leaving the loop cancels the request there.

        Raises RequestError for bad input and for an option that this replica cannot honour, ReplicaBusy, ReplicaLost
        with the tokens that were sent, and MinillmError when the replica failed at this request and lives on. A
        deadline that passed before it began gives finish_reason "abort".
        """

    async def drain(self, grace_s: float = 30.0) -> int:
        """Take nothing new from here, let our requests end; those that have not after so many seconds are ended with
        ReplicaLost. Returns how many that were."""

    async def close(self) -> None:
        """End what this object has started: requests, connections, an engine, a process. A second time, nothing."""
