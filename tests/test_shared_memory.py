"""The door of shared memory, and who knocks: strangers, floods, and peers with the key whose memory is a trap."""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import socket
import stat
import tempfile
import threading
import time
from collections import Counter

import pytest
import torch
from channels import KEY, WAIT_S, Waiting, no_threads
from disagg_pair import until
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.cluster import shared_memory, shared_ring
from minillm.cluster.shared_memory import HELLO, MAGIC, SharedMemoryListener, connect
from minillm.cluster.shared_ring import MAX_WINDOW, Ring, judge_memory, new_memory
from minillm.cluster.transport import ChannelClosed
from minillm.errors import MinillmError

SIZE = 1 << 16


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A friend is not taken for a stranger where the machine stands still."""
    monkeypatch.setattr(shared_memory, "HANDSHAKE_S", WAIT_S)


@pytest.fixture
def door():
    listener = SharedMemoryListener(KEY, SIZE)
    yield listener
    listener.close()


def place(door):
    return door.address.partition(":")[2]


def knock(door):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(WAIT_S)
    shared_memory._call(sock, place(door), time.monotonic() + WAIT_S)
    return sock


def known(door):
    """A socket that has shown the key, as a peer that has it could open one."""
    sock = knock(door)
    shared_memory._prove(sock, KEY, b"connector", b"listener")
    return sock


def hung_up(sock):
    """The other side ends it, whatever it says before."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    sock.close()
    return True


def greeted():
    """How many threads speak with who has not shown the key yet."""
    return sum(t.name == "minillm-greeting" for t in threading.enumerate())


def still_open(door):
    """And nobody was let in by mistake."""
    assert door.accept(0) is None
    mine = connect(place(door), KEY, WAIT_S)
    theirs = door.accept(WAIT_S)
    mine.send({"x": 1}, [torch.ones(3)])
    assert theirs.recv(WAIT_S)[0] == {"x": 1}
    mine.close()
    theirs.close()
    return True


STRANGERS = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b" " * 100,
    b"\0" * 68,
    b"\xff" * 200_000,
    MAGIC + b"\0" * 32 + b"\0" * 32,
    MAGIC + b"\0" * 32 + b"\0" * 32 + HELLO.pack(MAGIC, SIZE),
]


@pytest.mark.parametrize("said", STRANGERS, ids=range(len(STRANGERS)))
def test_strangers_are_hung_up_on(door, said):
    sock = knock(door)
    with contextlib.suppress(OSError):
        sock.sendall(said)
    assert hung_up(sock)
    assert still_open(door)


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=120))
def test_no_bytes_open_the_door(said):
    door = SharedMemoryListener(KEY, SIZE)
    try:
        sock = knock(door)
        try:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        assert hung_up(sock)
        assert door.accept(0) is None
    finally:
        door.close()


def test_nobody_waits_for_who_says_nothing(door):
    until(lambda: not greeted())
    silent = [knock(door) for _ in range(5)]
    until(lambda: greeted() == 5)
    assert still_open(door)
    for sock in silent:
        sock.close()


def test_who_says_nothing_is_hung_up_on(door, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "HANDSHAKE_S", 0.2)
        assert all(hung_up(sock) for sock in [knock(door) for _ in range(5)])
    assert still_open(door)


def test_who_says_a_byte_now_and_then_is_hung_up_on_as_well(door, monkeypatch):
    monkeypatch.setattr(shared_memory, "HANDSHAKE_S", 0.5)
    sock = knock(door)

    def drip():
        try:
            for _ in range(1000):
                sock.sendall(b"m")
                if not Waiting(lambda: sock.recv(4096) if sock.fileno() >= 0 else b"").waits(0.05):
                    continue
        except OSError:
            return "ended"

    assert Waiting(drip).ended() == "ended"
    sock.close()
    monkeypatch.setattr(shared_memory, "HANDSHAKE_S", WAIT_S)
    assert still_open(door)


def test_a_flood_does_not_make_more_threads_than_the_door_has_places(door):
    until(lambda: not greeted())  # of other doors
    crowd, most = [], 0
    for _ in range(5 * shared_memory.MAX_PENDING):
        crowd.append(knock(door))
        most = max(most, greeted())
    waiting = [sock for sock in crowd if sock.recv(1)]  # those who have a place are asked for the key
    assert len(waiting) == greeted() == shared_memory.MAX_PENDING
    assert most <= shared_memory.MAX_PENDING
    for sock in crowd:
        sock.close()
    until(lambda: not greeted())
    assert still_open(door)


def test_a_door_that_could_not_open_once_goes_on(door, monkeypatch):
    """Without a descriptor for it, a connection cannot be accepted. The next one can."""
    monkeypatch.setattr(shared_memory, "RETRY_S", 0.01)
    refused = threading.Event()
    accept = door._sock.accept

    class NoDescriptors:
        def __init__(self, sock):
            self._sock = sock

        def accept(self):
            if not refused.is_set():
                refused.set()
                raise OSError(errno.EMFILE, "too many open files")
            return accept()

        def __getattr__(self, name):
            return getattr(self._sock, name)

    door._sock = NoDescriptors(door._sock)
    assert still_open(door), "this one came through the accept that waited already"
    assert still_open(door)
    assert refused.is_set()


def test_a_door_that_had_no_thread_for_a_guest_goes_on(door, monkeypatch):
    """And has as many places as before."""
    count = shared_memory.MAX_PENDING + 1
    no_threads(monkeypatch, "minillm-greeting", count)
    assert all(hung_up(knock(door)) for _ in range(count))
    assert still_open(door)


def test_a_guest_who_could_not_be_listened_to_is_hung_up_on(door, monkeypatch):
    died = []
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_value))
    no_threads(monkeypatch, "minillm-shared-memory", 1)
    sock, fd = known(door), new_memory(SIZE)
    socket.send_fds(sock, [HELLO.pack(MAGIC, SIZE)], [fd])
    os.close(fd)
    assert hung_up(sock)
    assert still_open(door)
    assert not died


def test_who_has_no_thread_to_listen_by_gets_no_channel(door, monkeypatch):
    no_threads(monkeypatch, "minillm-shared-memory", 2)  # one for each side
    with pytest.raises(ChannelClosed, match="can't start new thread"):
        connect(place(door), KEY, WAIT_S)


def test_what_one_side_has_proved_cannot_be_said_back_to_it(door):
    """A stranger shows the listener its own proof: two connections, each answering with what the other was told."""
    one, two = knock(door), knock(door)
    first, second = (sock.recv(36) for sock in (one, two))
    one.sendall(second)
    two.sendall(first)
    proofs = [sock.recv(32) for sock in (one, two)]
    for sock, proof in zip((one, two), reversed(proofs), strict=True):
        with contextlib.suppress(OSError):
            sock.sendall(proof)
    assert hung_up(one)
    assert hung_up(two)
    assert still_open(door)


def test_the_key_is_never_said():
    """What goes over the socket is made anew each time, and does not contain it."""
    a, b = socket.socketpair()
    heard = []

    class Tap:
        def __init__(self, sock):
            self.sock = sock

        def sendall(self, data):
            heard.append(bytes(data))
            self.sock.sendall(data)

        def recv(self, count):
            return self.sock.recv(count)

    other = Waiting(lambda: shared_memory._prove(b, KEY, b"listener", b"connector"))
    shared_memory._prove(Tap(a), KEY, b"connector", b"listener")
    assert other.ended() is None
    assert KEY not in b"".join(heard)
    a.close()
    b.close()


def test_a_listener_that_does_not_have_the_key_is_not_believed():
    """Somebody else listens there: no memory is shared with them."""
    fake = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"@minillm-test-{secrets.token_hex(12)}"
    fake.bind(shared_memory._place(name))
    fake.listen(1)

    def pretend():
        sock, _ = fake.accept()
        sock.sendall(MAGIC + bytes(32))
        sock.sendall(bytes(32))
        data, fds, _, _ = socket.recv_fds(sock, 4096, 4)
        while data:
            data, more, _, _ = socket.recv_fds(sock, 4096, 4)
            fds += more
        sock.close()
        return fds

    there = Waiting(pretend)
    with pytest.raises(ChannelClosed, match="has another key"):
        connect(name, KEY, WAIT_S)
    assert there.ended() == []
    fake.close()


# Peers that have the key


def plain_file():
    with tempfile.TemporaryFile() as file:
        file.write(b"secret".ljust(SIZE))
        file.flush()
        return os.dup(file.fileno())


def unsealed():
    fd = os.memfd_create("x")
    os.ftruncate(fd, SIZE)
    return fd


def weakly_sealed():
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return fd


def a_pipe():
    reader, writer = os.pipe()
    os.close(writer)
    return reader


TRAPS = [
    ("a file of somebody else", plain_file, SIZE),
    ("memory that can be cut off under the reader", unsealed, SIZE),
    ("memory that can only not grow", weakly_sealed, SIZE),
    ("a pipe", a_pipe, SIZE),
    ("a device", lambda: os.open("/dev/zero", os.O_RDONLY), SIZE),
    ("a folder", lambda: os.open("/", os.O_RDONLY), 4096),
    ("less than it says", lambda: new_memory(SIZE), 2 * SIZE),
    ("more than it says", lambda: new_memory(SIZE), SIZE // 2),
    ("nothing", lambda: new_memory(SIZE), 0),
    ("far too much", lambda: new_memory(MAX_WINDOW + 4096), MAX_WINDOW + 4096),
    ("far more than there is", lambda: new_memory(SIZE), (1 << 64) - 1),
]


@pytest.mark.parametrize(("make", "said"), [t[1:] for t in TRAPS], ids=[t[0] for t in TRAPS])
def test_memory_that_is_a_trap_is_not_mapped(door, make, said):
    fd = make()
    with pytest.raises(MinillmError, match="offered memory"):
        judge_memory(fd, said)
    sock = known(door)
    socket.send_fds(sock, [HELLO.pack(MAGIC, said)], [fd])
    os.close(fd)
    assert hung_up(sock)
    assert still_open(door)


def test_what_new_memory_makes_cannot_be_cut_off():
    fd = new_memory(SIZE)
    judge_memory(fd, SIZE)
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


@pytest.mark.parametrize(
    ("data", "count"),
    [(HELLO.pack(MAGIC, SIZE), 0), (HELLO.pack(MAGIC, SIZE), 3), (HELLO.pack(b"HTTP", SIZE), 1), (b"x", 1)],
)
def test_a_peer_that_offers_no_memory_or_says_it_wrongly_is_hung_up_on(door, data, count):
    before = memories()
    sock = known(door)
    fds = [new_memory(SIZE) for _ in range(count)]
    socket.send_fds(sock, [data], fds) if fds else sock.sendall(data)
    for fd in fds:
        os.close(fd)
    sock.shutdown(socket.SHUT_WR)
    assert hung_up(sock)
    assert still_open(door)
    until(lambda: memories() <= before)


def memories():
    """This process's descriptors of shared memory: file, and how many lead to it."""
    found = Counter()
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # it is closed by now
            if "minillm-kv" in os.readlink(f"/proc/self/fd/{fd}"):
                found[os.fstat(int(fd)).st_ino] += 1
    return found


def test_a_descriptor_that_is_kept_is_seen():
    before, fd = memories(), new_memory(SIZE)
    assert not shared_ring.SEALED or not memories() <= before
    os.close(fd)
    assert memories() <= before


def test_a_reader_cannot_write_into_the_writer_s_memory(door):
    mine = connect(place(door), KEY, WAIT_S)
    theirs = door.accept(WAIT_S)
    with pytest.raises(TypeError, match="read-only"):
        theirs._in._memory[0] = 1
    mine.close()
    theirs.close()


def test_a_ring_goes_round():
    fd = new_memory(mmap.PAGESIZE)
    out, into = (Ring(fd, mmap.PAGESIZE, writable) for writable in (True, False))
    os.close(fd)
    noise = torch.Generator().manual_seed(0)
    for n in [1, mmap.PAGESIZE, 1000, 4000, mmap.PAGESIZE - 1, 0, 3, 4095, 97] * 3:
        x = torch.empty(n, dtype=torch.uint8).random_(generator=noise)
        got = bytearray(n)
        out.write(x.numpy().data)
        into.read(memoryview(got))
        assert bytes(got) == bytes(x.numpy().data)


def test_without_sealed_memory_an_unlinked_file_and_a_folder_of_our_own_serve(monkeypatch):
    """As on systems other than Linux. Nothing is left in the folder for temporary files."""
    monkeypatch.setattr(shared_ring, "SEALED", False)
    monkeypatch.setattr(shared_memory, "SEALED", False)
    door = SharedMemoryListener(KEY, SIZE)
    folder, path = os.path.split(door.address.removeprefix("unix:"))
    assert os.stat(folder).st_mode & 0o077 == 0
    assert os.listdir(folder) == [path]
    assert still_open(door)
    door.close()
    assert not os.path.exists(folder)


def test_a_path_can_be_listened_at_again_after_a_clean_end_and_after_a_kill(tmp_path):
    path = str(tmp_path / "kv")
    first = SharedMemoryListener(KEY, place=path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(MinillmError, match="cannot listen"):  # somebody is there
        SharedMemoryListener(KEY, place=path)
    first.close()
    assert not os.path.exists(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(path)
    assert os.path.exists(path)  # nobody listens any more
    again = SharedMemoryListener(KEY, place=path)
    again.close()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(MinillmError, match="cannot listen"):  # and what is no socket is not touched
        SharedMemoryListener(KEY, place=str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"
