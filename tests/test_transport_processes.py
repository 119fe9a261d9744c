"""Channels between real processes: pieces of KV to the bit, a process that is killed, and what it leaves behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import channel_peer
import pytest

from minillm.cluster import shared_memory
from minillm.cluster.shared_memory import SharedMemoryListener, connect
from minillm.cluster.transport import ChannelClosed

KEY, WAIT_S = "the key of both", channel_peer.WAIT_S
HERE = Path(__file__).parent


class Nursery:
    """Starts peers, and ends those that have not ended."""

    def __init__(self, folder):
        self.folder, self.pids, self.gone_pids = folder, [], set()
        self.log = folder / "log"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "channel_peer.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, env=environment,
            )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n", self.log.read_text()

    def start(self, job, **arguments):
        """(pid, file of its report)"""
        result = self.folder / f"result{len(self.pids)}"
        self.process.stdin.write(json.dumps({"job": job, "result": str(result)} | arguments) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        self.pids.append(pid)
        return pid, result

    def read(self, path):
        """What a job has said; its last words if it says nothing."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if Path(path).exists():
                return json.loads(Path(path).read_text())
            time.sleep(0.01)
        raise AssertionError(self.log.read_text())

    def gone(self, pid):
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                self.gone_pids.add(pid)  # its number may be another's from now on
                return True
            time.sleep(0.01)
        return False

    def close(self):
        for pid in set(self.pids) - self.gone_pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.stdin.close()
        self.process.wait(WAIT_S)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    made = Nursery(tmp_path_factory.mktemp("peers"))
    yield made
    made.close()
    assert made.log.read_text() == ""  # no traceback, and no resource tracker that speaks of leaks


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(shared_memory, "HANDSHAKE_S", WAIT_S)


@pytest.fixture
def door():
    listener = SharedMemoryListener(KEY.encode(), channel_peer.WINDOW)
    yield listener
    listener.close()


def mapped():
    """The shared memory that this process still sees. The other one is gone, and it has no name: then nobody does."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else ()
    return {line for line in lines if "minillm-kv" in line}


@pytest.fixture
def unmapped(nursery):
    """Whether nothing more is mapped than before the test."""
    before = mapped()
    return lambda: not mapped() - before


def test_pieces_go_to_another_process_and_come_back_to_the_bit(nursery, door):
    pid, result = nursery.start("connector", address=door.address, key=KEY, what="exchange")
    channel = door.accept(WAIT_S)
    assert channel_peer.exchange(channel) == {"right": 11}
    assert nursery.read(result) == {"right": 11}
    with pytest.raises(ChannelClosed, match="closed the channel"):
        channel.recv(WAIT_S)
    channel.close()
    assert nursery.gone(pid)


def test_pieces_go_through_torch_distributed_to_the_bit(nursery, tmp_path):
    ranks = [nursery.start("rank", rank=r, store=str(tmp_path / "store"), what="exchange") for r in range(2)]
    assert [nursery.read(result) for _, result in ranks] == [{"right": 11}] * 2
    assert all(nursery.gone(pid) for pid, _ in ranks)


def killed(nursery, pid):
    os.kill(pid, signal.SIGKILL)
    assert nursery.gone(pid)


def test_a_process_that_is_killed_is_noticed_by_who_waits_for_it(nursery, door, unmapped):
    """The time to wait is longer than the test may take; nothing is polled. What it had sent still arrives."""
    pid, _ = nursery.start("connector", address=door.address, key=KEY, what="hang")
    channel = door.accept(WAIT_S)
    assert channel.recv(WAIT_S)[0] == {"here": pid}
    killed(nursery, pid)
    with pytest.raises(ChannelClosed, match="its process has ended"):
        channel.recv(3600)
    with pytest.raises(ChannelClosed):
        channel.send({})
    channel.close()
    assert unmapped()


def test_a_process_that_is_killed_is_noticed_by_who_sends_to_it(nursery, door, unmapped):
    pid, _ = nursery.start("connector", address=door.address, key=KEY, what="hang")
    channel = door.accept(WAIT_S)
    assert channel.recv(WAIT_S)[0] == {"here": pid}
    channel.send({}, [channel_peer.big()[: channel_peer.WINDOW - 200]])
    killed(nursery, pid)
    with pytest.raises(ChannelClosed):
        channel.send({}, [channel_peer.big()])
    channel.close()
    assert unmapped()


def test_a_process_that_is_killed_while_it_sends_leaves_whole_messages_and_a_half_one_that_is_none(
    nursery, door, unmapped
):
    pid, _ = nursery.start("connector", address=door.address, key=KEY, what="flood")
    channel = door.accept(WAIT_S)
    assert channel.recv(WAIT_S)[0] == {"here": pid}
    want = channel_peer.crc([channel_peer.big()])
    heard = [channel_peer.crc(channel.recv(WAIT_S)[1])]
    killed(nursery, pid)
    why, _ = channel_peer.until_closed(lambda: heard.append(channel_peer.crc(channel.recv(WAIT_S)[1])))
    assert "its process has ended" in why
    assert all(crc == want for crc in heard)
    channel.close()
    assert unmapped()


def test_a_listener_that_is_killed_leaves_nothing_to_connect_to(nursery):
    pid, result = nursery.start("listener", key=KEY, what="hang")
    address = nursery.read(f"{result}.address")
    place = address.partition(":")[2]
    channel = connect(place, KEY.encode(), WAIT_S)
    assert channel.recv(WAIT_S)[0] == {"here": pid}
    killed(nursery, pid)
    with pytest.raises(ChannelClosed, match="its process has ended"):
        channel.recv(3600)
    channel.close()
    with pytest.raises(ChannelClosed, match="no channel to"):
        connect(place, KEY.encode(), WAIT_S)
    if os.path.exists("/proc/net/unix"):
        assert place not in Path("/proc/net/unix").read_text()


@pytest.mark.parametrize("survivor", ["wait", "push"])
def test_a_rank_that_is_killed_is_noticed_by_the_other_one(nursery, tmp_path, survivor):
    """By who waits for it, and by who sends to it."""
    _, result = nursery.start("rank", rank=0, store=str(tmp_path / "store"), what=survivor)
    pid, _ = nursery.start("rank", rank=1, store=str(tmp_path / "store"), what="dies_when_spoken_to")
    assert nursery.gone(pid)
    assert "the other process is gone" in nursery.read(result)["why"]
