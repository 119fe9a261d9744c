"""A decode engine's connection to one prefill engine: made, judged, watched, and made again. Lesson 15."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from minillm.cluster.disagg import Said, Stats, read, text
from minillm.cluster.layout import KVLayout, why_not
from minillm.cluster.link import Link, Posted
from minillm.cluster.transport import Channel, Message
from minillm.errors import MinillmError

log = logging.getLogger("minillm.kv")
Connect = Callable[[], Channel]
RETRY_S, MOST_RETRY_S = 0.1, 2.0  # between attempts to connect


class Owner(Protocol):
    """`remote_prefill.RemotePrefill`, as its peers see it. The `on_` methods are called in the engine's thread."""

    llm: Any
    layout: KVLayout
    stats: Stats
    under_way: dict[Any, Any]

    def on_message(self, peer: Any, said: Said) -> None: ...

    def on_lost(self, peer: Any, why: str) -> None: ...

    def on_tick(self) -> None: ...


class Peer:
    """One prefill engine: connected, and connected again when it comes back.

    state: "ready", "unreachable", "silent": connected, but a whole lease has passed without a message that is no
    refusal, so it gets nothing until there is one, "draining": it takes no more, and finishes what it has, or
    "refused": its KV would be of no use here, as the log says.
    tokens: under way. heard: messages so far, without refusals. They are signs that its engine takes steps, but for one
    lease: pieces that were kept for want of room here may follow when it hangs already.
    """

    def __init__(self, remote: Owner, name: str, connect: Connect):
        self.remote, self.name, self._connect = remote, name, connect
        self.tokens, self.epoch, self.heard = 0, "", 0
        self._state, self._draining = "unreachable", False
        self._link: Link | None = None
        self.posted = Posted(remote.llm, self._look)
        self._closed, self._lost = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"minillm-kv-{name}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """Who drains does so until its channel ends, whatever else is heard of it."""
        return "draining" if self._draining and self._state in ("ready", "silent") else self._state

    def say(self, message: Message) -> None:
        if (link := self._link) is not None:
            link.say(message)

    def fell_silent(self) -> None:
        if self.state == "ready":
            self._state = "silent"
            log.warning("prefill engine %s says nothing; prompts are computed here until it does", self.name)
            self.say({"kind": "ping"})

    def close(self) -> None:
        self._closed.set()
        self._lost.set()
        if self._thread is not threading.current_thread():
            self._thread.join(10.0)

    def _keep(self) -> None:
        wait, told = RETRY_S, ""
        while not self._closed.is_set():
            try:
                self._link, told = self._join(self._connect()), ""
            except Exception as error:  # this thread is the only one that would try again
                if str(error) != told:
                    log.warning("prefill engine %s is not there: %s", self.name, told := str(error))
                self._closed.wait(wait)
                wait = min(2 * wait, MOST_RETRY_S)
                continue
            self._lost.wait()
            if self._closed.is_set():
                self._link.flush()
            self._link.close()
            self._link, self.epoch = None, ""
            if self.state == "ready" and not self._closed.is_set():
                log.warning("prefill engine %s is gone; its prompts are computed here", self.name)
            self._state, self._draining, wait = "unreachable", False, RETRY_S
            self.remote.llm.call(lambda: self.remote.on_lost(self, "its channel has ended"))
            self._closed.wait(RETRY_S)

    def _join(self, channel: Channel) -> Link:
        self._lost.clear()
        if self._closed.is_set():  # in between: what `close` has set was cleared again
            self._lost.set()
        # Before a hello says that it is ready.
        self._link = Link(channel, self._hear, self._fall, self._tick, busy=lambda: self.posted.behind)
        return self._link.start()

    def _fall(self, why: str) -> None:
        self._lost.set()

    def _tick(self) -> None:
        if self.remote.under_way:
            self.remote.llm.call(self.remote.on_tick)

    def _hear(self, message: Message, tensors: list[Tensor]) -> None:
        """In the link's thread: what takes long is done here, the checksum, and what is no message goes no further."""
        if message.get("kind") != "refused":  # that its link may say alone, even if its engine hangs
            self.heard += 1
            if self._state == "silent":
                self._state = "ready"
                log.info("prefill engine %s speaks again", self.name)
        if message.get("kind") == "hello":
            self._greet(message)
            return
        if message.get("kind") == "draining":
            self._draining = True
            log.info("prefill engine %s is draining; new prompts go elsewhere", self.name)
            return
        if message.get("kind") == "pong":
            return
        try:
            said = read(message, tensors, self.remote.layout)
        except MinillmError as error:
            self.remote.stats.refused({"malformed": 1})
            log.warning("prefill engine %s sent what is no message: %s", self.name, error)
            return
        self.posted.post(lambda: self.remote.on_message(self, said), sum(t.nbytes for t in said.tensors))

    def _look(self) -> None:
        if (link := self._link) is not None:
            link.look()

    def _greet(self, message: Message) -> None:
        try:
            self.epoch = text(message, "epoch")
            why = why_not(KVLayout.from_dict(message.get("layout")), self.remote.layout)
        except MinillmError as error:
            why = str(error)
        if why is not None:
            self._state = "refused"
            log.error("prefill engine %s is of no use here: %s", self.name, why)
            return
        self._state = "ready"
        log.info("prefill engine %s is ready", self.name)
