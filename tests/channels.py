"""Both ends of a channel of each kind, in this process: for the suites of transports and of what is built on them."""

import threading
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from minillm.cluster import distributed, shared_memory
from minillm.cluster.distributed import DistChannel
from minillm.cluster.in_process_transport import pair

KINDS = ("in-process", "shared-memory", "distributed")
KEY = b"a secret"
WAIT_S = 120.0  # of a machine that is busy with other things, or stood still; what is waited for takes far less


@contextmanager
def ends(kind, window=1 << 20, stall_s=WAIT_S):
    """(one end, the other end), closed at the end. window: bytes that a direction holds."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(shared_memory, "HANDSHAKE_S", WAIT_S)
        patch.setattr(distributed, "LINGER_S", WAIT_S)
        if kind == "in-process":
            both = pair(window, stall_s)
        elif kind == "shared-memory":
            listener = shared_memory.SharedMemoryListener(KEY, window, stall_s)
            stack.callback(listener.close)
            place = listener.address.partition(":")[2]
            both = shared_memory.connect(place, KEY, WAIT_S, window, stall_s), listener.accept(WAIT_S)
        else:
            both = tuple(DistChannel(group, window, stall_s) for group in gloo_pair())
        for end in both:
            stack.callback(end.close)
        yield both


def no_threads(monkeypatch, name, count):
    """So many threads of that name cannot be started, as where a process may have no more."""
    start, left = threading.Thread.start, [None] * count

    def refuses(thread):
        if thread.name == name and left:
            left.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)


_worlds = []


def gloo_pair():
    """Two ranks of a real gloo world, as `DistGroup` holds them, without a process for each. Made once: it is slow."""
    if not _worlds:
        store, made = dist.HashStore(), {}

        def join(rank):
            made[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=2 * WAIT_S))

        in_parallel(lambda: join(0), lambda: join(1))
        for rank in range(2):
            held = SimpleNamespace(_get_backend=lambda device, rank=rank: made[rank])
            _worlds.append(SimpleNamespace(size=2, rank=rank, _group=held))
    return _worlds


def in_parallel(*works):
    """Each in a thread of its own; what they returned. Raises what one of them has raised, or if one does not end."""
    results, faults = [None] * len(works), []

    def one(i):
        try:
            results[i] = works[i]()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(works))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(2 * WAIT_S)
        assert not t.is_alive() or faults, "a thread waits for ever"
    if faults:
        raise faults[0]
    return results


class Waiting:
    """`work` in a thread, which is expected to wait: `ended()` is what it returned or raised, when it has."""

    def __init__(self, work):
        self._result = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work):
        try:
            self._result = work()
        except Exception as error:
            self._result = error

    def waits(self, s=0.1):
        self._thread.join(s)
        return self._thread.is_alive()

    def ended(self):
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "a thread waits for ever"
        return self._result
