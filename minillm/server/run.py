"""uvicorn, with this project's rules for starting and ending. Lesson 13.

uvicorn's own reaction to SIGTERM closes its sockets at once and waits for the streams without an end. Here the server
first drains: new requests are told 503 while those that run go on, for at most the grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn

from minillm.errors import MinillmError
from minillm.server.config import ServerConfig
from minillm.server.connection import Connection, connection_class, watch
from minillm.server.open_files import AT_ONCE, most_connections
from minillm.server.state import State

log = logging.getLogger("minillm.server")
WAITING = 2048  # connections that the kernel may hold until they are accepted
LOOK_S = 0.2  # between looks at an engine that may have ended


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # ours are in `stop_on_signals`
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():  # asyncio has one number for what it accepts in a turn and what the kernel may hold
            sock.listen(WAITING)


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens. Raises MinillmError in words when the address, or so many connections, cannot be had.

    Its small send buffer is inherited by every connection. With the kernel's own, which grows to megabytes, a reader
    could stall for ten thousand tokens before anybody noticed.
    """
    most_connections(config.max_connections)
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        # Told that it is TCP, asyncio sends each token at once. Otherwise the kernel would hold it back until the token
        # before it is acknowledged, which a reader may do only every 40 ms (Nagle, RFC 896; delayed ACK, RFC 1122).
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.send_buffer_bytes)
        sock.bind((config.host, config.port))
        shared(sock, False)
    except OSError as error:
        raise MinillmError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror or error}); is another server there? "
            "--port chooses another, and 0 a free one"
        ) from None
    return sock


def shared(sock: socket.socket, on: bool = True) -> None:
    """Off from bind until it listens: in between, which is while the weights are read, another server could bind the
    same port too. On afterwards, since connections inherit it, and those that end would keep the next server away.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(on))


def url_of(config: ServerConfig, sock: socket.socket) -> str:
    """Where a client of this machine finds it."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{sock.getsockname()[1]}"


async def serve(
    app: Any, config: ServerConfig, sock: socket.socket, stop: asyncio.Event, hurry: asyncio.Event | None = None
) -> int:
    """Serve until `stop` is set, or the engine has ended or computes nothing (lifecycle.failed).

    `hurry` ends the grace period at once.

    Returns how many answers a drain had to cut short.
    """
    state: State = app.state.minillm
    shared(sock)
    server = _Uvicorn(uvicorn.Config(
        app, http=connection_class(config, state.metrics), ws="none", log_config=None, access_log=False, lifespan="on",
        backlog=AT_ONCE, timeout_keep_alive=math.ceil(config.idle_timeout_s), server_header=False,
        timeout_graceful_shutdown=2,  # what is open then is idle, or was told
    ))  # fmt: skip
    running = asyncio.create_task(server.serve(sockets=[sock]))
    connections = cast(set[Connection], server.server_state.connections)
    watching = asyncio.create_task(watch(connections))
    ended = 0
    try:
        broken = lambda: state.llm.dead is not None or state.lifecycle.failed is not None
        while not running.done() and not stop.is_set() and not broken():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S)
        if not running.done():
            grace = 1.0 if broken() else config.grace_s  # streams of a dead engine have been told
            ended = await state.lifecycle.start_drain(grace, hurry)
    finally:
        server.should_exit = True
        await running
        watching.cancel()
        for connection in list(connections):  # of readers that stall: they would hear nothing, and wait
            connection.transport.abort()
        await asyncio.sleep(0)
    return ended


def stop_on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """SIGTERM and SIGINT drain; a second one does not wait."""
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        if stop.is_set():
            hurry.set()
        else:
            log.info("%s: draining", name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, signal.Signals(number).name)
