"""The server inside a notebook or a test: uvicorn in a thread, on 127.0.0.1 and a free port. Lesson 13.

>>> with LocalServer(AsyncLLM()) as server:
...     client = openai.OpenAI(base_url=server.url + "/v1", api_key="-")
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

from minillm.async_llm import AsyncLLM
from minillm.errors import MinillmError
from minillm.server.app import make_app
from minillm.server.config import ServerConfig
from minillm.server.run import listen, serve, url_of
from minillm.server.state import State


class LocalServer:
    """options: `ServerConfig`'s, and admission. Leaving the block ends the server; the engine stays the caller's."""

    def __init__(self, llm: AsyncLLM, *, admission: Any = None, wait_s: float = 60.0, **options: Any):
        self.config = ServerConfig(**({"port": 0, "grace_s": 0.0} | options))
        self.app = make_app(llm, self.config, admission=admission)
        self.state: State = self.app.state.minillm
        self.wait_s = wait_s
        self._socket: socket.socket = listen(self.config)
        self.port: int = self._socket.getsockname()[1]
        self.url = url_of(self.config, self._socket)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.failure: BaseException | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._work, name="minillm-server", daemon=True)

    def __enter__(self) -> LocalServer:
        self._thread.start()
        end = time.monotonic() + self.wait_s
        while self.state.lifecycle.not_ready() is not None:
            if not self._thread.is_alive() or time.monotonic() > end:
                why = self.failure or self.state.lifecycle.not_ready()
                self.stop()
                raise MinillmError(f"the server did not become ready within {self.wait_s:g} s: {why}")
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Drain and end. A second time, nothing."""
        if self.loop is not None and self._stop is not None and self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(self.config.grace_s + 30)
        self._socket.close()

    def _work(self) -> None:
        async def main() -> None:
            self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await serve(self.app, self.config, self._socket, self._stop)

        try:
            asyncio.run(main())
        except BaseException as error:
            self.failure = error
