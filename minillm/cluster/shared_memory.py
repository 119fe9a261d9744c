"""A channel between processes of one machine: bytes through shared memory, counts through a local socket. Lesson 15.

Each side writes into a ring of its own (shared_ring.py), which the other maps read-only, and says how much. The socket
carries the rings' descriptors, shows each side that the other has the key, and ends at once when a process does.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import shutil
import socket
import stat
import struct
import tempfile
import threading
import time

from minillm.cluster.shared_ring import SEALED, Ring, judge_memory, new_memory
from minillm.cluster.stream import STEP, StreamChannel
from minillm.cluster.transport import STALL_S, AcceptQueue, Channel, ChannelClosed
from minillm.errors import MinillmError

WINDOW = 32 << 20
HANDSHAKE_S = 5.0
RETRY_S = 0.1
MAX_PENDING = 16  # connections that have not shown the key yet
HELLO = struct.Struct("<4sQ")
MAGIC = b"mlm1"
COUNT = struct.Struct("<cQ")
WROTE, READ = b"w", b"r"


class SharedMemoryChannel(StreamChannel):
    """One end. The socket is authenticated already; this exchanges the rings."""

    def __init__(self, sock: socket.socket, window: int = WINDOW, stall_s: float = STALL_S):
        fd = new_memory(window)
        try:
            self._out: Ring | None = Ring(fd, window, writable=True)
            socket.send_fds(sock, [HELLO.pack(MAGIC, window)], [fd])
        finally:
            os.close(fd)
        self._in: Ring | None
        self._in, peer_window = _their_ring(sock)
        # Each side reads the other's ring: what may be written is one's own size.
        super().__init__(window=peer_window, peer_window=window, stall_s=stall_s)
        sock.settimeout(stall_s)
        self._sock, self._told, self._telling = sock, 0, threading.Lock()
        threading.Thread(target=self._listen, name="minillm-shared-memory", daemon=True).start()

    def _write(self, part: memoryview) -> None:
        if (ring := self._out) is None:
            raise ChannelClosed(self._ended or "the channel was closed")
        ring.write(part)
        self._told += len(part)
        if self._told >= STEP:
            self._flush()

    def _flush(self) -> None:
        if self._told:
            self._tell(WROTE, self._told)
            self._told = 0

    def _read(self, into: memoryview) -> None:
        if (ring := self._in) is None:
            raise ChannelClosed(self._ended or "the channel was closed")
        ring.read(into)

    def _grant(self, count: int) -> None:
        self._tell(READ, count)

    def _tell(self, kind: bytes, count: int) -> None:
        with self._telling:
            self._sock.sendall(COUNT.pack(kind, count))

    def _release(self) -> None:
        self._out = self._in = None  # unmapped when the last copy under way has ended
        _hang_up(self._sock)  # which ends the thread below, and that closes it

    def _listen(self) -> None:
        """Counts of the other side, until the socket ends: that is at once when its process does, however it dies."""
        try:
            while True:
                kind, count = COUNT.unpack(_read_exactly(self._sock, COUNT.size, None))
                if kind == WROTE:
                    self._arrived(count)
                elif kind == READ:
                    self._granted(count)
                else:
                    raise MinillmError(f"the other side said {kind!r}, which means nothing")
        except EOFError:
            self._end("the other side has closed the channel, or its process has ended")
        except MinillmError as error:
            self._fail(f"what came is not this protocol: {error}")
        except OSError as error:
            self._end(f"the other process is gone ({error})")
        finally:
            with self._telling:
                self._sock.close()


def _remove_if_deserted(path: str) -> None:
    """A socket file whose listener was killed stays, and nobody could listen there again."""
    if not (os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode)):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        try:
            knock.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


class SharedMemoryListener:
    """A local socket. `address` is "unix:@NAME" on Linux (no file, so none is left behind), "unix:/PATH" elsewhere.

    place: "@NAME" or "/PATH" to listen at; None draws one. MinillmError if it cannot be had.
    """

    def __init__(self, key: bytes, window: int = WINDOW, stall_s: float = STALL_S, place: str | None = None):
        self._key, self._window, self._stall_s = key, window, stall_s
        self._folder: str | None = None
        if place is not None:
            pass
        elif SEALED:
            place = f"@minillm-{secrets.token_hex(12)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="minillm-")
            place = f"{self._folder}/s"
        self._file = None if place.startswith("@") else place
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if self._file is not None:
                _remove_if_deserted(self._file)
            self._sock.bind(_place(place))
            if self._file is not None:
                os.chmod(self._file, 0o600)
        except OSError as error:
            self._sock.close()
            raise MinillmError(
                f"cannot listen at unix:{place:.120} ({error.strerror or error}); is somebody there already?"
            ) from None
        self._sock.listen(MAX_PENDING)
        self.address = f"unix:{place}"
        self._arrived = AcceptQueue()
        self._pending = threading.BoundedSemaphore(MAX_PENDING)
        threading.Thread(target=self._listen, name="minillm-listener", daemon=True).start()

    def accept(self, timeout_s: float) -> Channel | None:
        return self._arrived.get(timeout_s)

    def close(self) -> None:
        self._arrived.close()
        _shut(self._sock)
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._file)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if not self._arrived.open:
                    return
                time.sleep(RETRY_S)  # no descriptor is left, say; some will be
                continue
            if not self._pending.acquire(blocking=False):  # somebody floods the door
                _shut(sock)
                continue
            try:
                threading.Thread(target=self._greet, args=(sock,), name="minillm-greeting", daemon=True).start()
            except RuntimeError:  # no thread is left for this one
                self._pending.release()
                _shut(sock)

    def _greet(self, sock: socket.socket) -> None:
        """One connection: it shows the key within HANDSHAKE_S, or it is dropped. Others do not wait for it."""
        try:
            sock.settimeout(HANDSHAKE_S)
            _prove(sock, self._key, b"listener", b"connector")
            channel = SharedMemoryChannel(sock, self._window, self._stall_s)
        except Exception:  # a stranger, or no thread is left for a friend
            _shut(sock)
            return
        finally:
            self._pending.release()
        self._arrived.put(channel)


def connect(place: str, key: bytes, timeout_s: float, window: int = WINDOW, stall_s: float = STALL_S
            ) -> SharedMemoryChannel:  # fmt: skip
    """A channel to the listener at "@NAME" or "/PATH". Raises ChannelClosed if nobody is there or the key is wrong."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        _call(sock, place, time.monotonic() + timeout_s)
        _prove(sock, key, b"connector", b"listener")
        return SharedMemoryChannel(sock, window, stall_s)
    except (OSError, EOFError, RuntimeError) as error:
        _shut(sock)
        why = str(error) or "it hung up: the key may be another one"
        raise ChannelClosed(f"no channel to unix:{place:.120}: {why}") from error
    except MinillmError as error:
        _shut(sock)
        raise ChannelClosed(f"no channel to unix:{place:.120}: {error}") from error


def _call(sock: socket.socket, place: str, deadline: float) -> None:
    while True:
        try:
            return sock.connect(_place(place))
        except BlockingIOError:  # a local socket does not wait where many knock at once
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _place(place: str) -> str:
    return "\0" + place[1:] if place.startswith("@") else place


def _prove(sock: socket.socket, key: bytes, mine: bytes, theirs: bytes) -> None:
    """Both sides show that they have the key, by a keyed hash of the other's random bytes. The key is not sent.

    Each hash says who made it, so that what one side has shown cannot be shown back to it.
    """
    nonce = secrets.token_bytes(32)
    sock.sendall(MAGIC + nonce)
    got = _read_exactly(sock, len(MAGIC) + 32, HANDSHAKE_S)
    if got[: len(MAGIC)] != MAGIC:
        raise MinillmError("the other side does not speak this protocol")
    sock.sendall(hmac.digest(key, mine + nonce + got[len(MAGIC) :], "sha256"))
    expected = hmac.digest(key, theirs + got[len(MAGIC) :] + nonce, "sha256")
    if not hmac.compare_digest(_read_exactly(sock, 32, HANDSHAKE_S), expected):
        raise MinillmError("the other side has another key; both sides need the same one")


def _their_ring(sock: socket.socket) -> tuple[Ring, int]:
    data, fds, flags, _ = socket.recv_fds(sock, HELLO.size, 1)
    try:
        if len(fds) != 1 or flags & socket.MSG_CTRUNC:
            raise MinillmError("the other side did not offer memory once")
        data += _read_exactly(sock, HELLO.size - len(data), HANDSHAKE_S)
        magic, size = HELLO.unpack(data)
        if magic != MAGIC:
            raise MinillmError("the other side does not speak this protocol")
        judge_memory(fds[0], size)
        return Ring(fds[0], size, writable=False), size
    finally:
        for fd in fds:
            os.close(fd)


def _read_exactly(sock: socket.socket, count: int, within_s: float | None) -> bytes:
    """count bytes. EOFError if the other side ends first, TimeoutError if they are not all there within_s seconds."""
    data, deadline = b"", None if within_s is None else time.monotonic() + within_s
    while len(data) < count:
        if deadline is not None and time.monotonic() > deadline:  # a byte now and then is no way to hold the door
            raise TimeoutError("the other side does not answer")
        try:
            part = sock.recv(count - len(data))
        except TimeoutError:
            continue
        if not part:
            raise EOFError
        data += part
    return data


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _shut(sock: socket.socket) -> None:
    _hang_up(sock)
    sock.close()
