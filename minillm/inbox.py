"""`Inbox`: what callers ask of the engine's thread, in order. Lesson 13 puts a server on it.

A step may take seconds, and one that hangs never ends. Callers who give up and try again would meanwhile leave a prompt
behind each, which no bound of the queue counts any more. So what has not been heard can be taken back.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Like queue.SimpleQueue. Every call may come from any thread."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._news = threading.Condition()

    def put(self, item: T) -> None:
        with self._news:
            self._items.append(item)
            self._news.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """The oldest. With block, waits for one, at most so many seconds. Raises queue.Empty."""
        with self._news:
            if not self._items and not (block and self._news.wait_for(lambda: self._items, timeout)):
                raise queue.Empty
            return self._items.popleft()

    def take_back(self, item: T) -> bool:
        """Whether it was still there; now it is not. O(what waits)."""
        with self._news:
            try:
                self._items.remove(item)
            except ValueError:
                return False
            return True

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items
