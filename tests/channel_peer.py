"""Other processes for tests/test_transport_processes.py. Each line of stdin starts one: it is forked, so torch is
loaded once for all of them. A job writes what it has seen, as JSON, to the file that it is given.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
from test_layout import STORED, full_pool

from minillm.cluster import shared_memory
from minillm.cluster.distributed import DistChannel
from minillm.cluster.frame import as_bytes
from minillm.cluster.shared_memory import SharedMemoryListener, connect
from minillm.cluster.transport import ChannelClosed
from minillm.parallel.group import DistGroup

WINDOW = 1 << 20
WAIT_S = 120.0  # of a machine that is busy with other things, or stood still
IDS = [3, 8, 1]


def crc(tensors):
    return [zlib.crc32(as_bytes(t)) for t in tensors]


def send_pieces(channel):
    """KV of every dtype, layer by layer, out of a pool that the other side can make too; then much of it at once."""
    for n, stored in enumerate(STORED):
        pool = full_pool(*stored)
        for layer in range(2):
            channel.send({"stored": n, "layer": layer}, pool.read_tokens(layer, IDS, 1, 10))
    channel.send({"big": True}, [big()])


def big():
    return torch.empty(5 << 20, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(7))


def check_pieces(channel):
    """How many pieces came, all right to the bit."""
    for n, stored in enumerate(STORED):
        pool = full_pool(*stored)
        for layer in range(2):
            message, tensors = channel.recv(WAIT_S)
            assert message == {"stored": n, "layer": layer}
            assert crc(tensors) == crc(pool.read_tokens(layer, IDS, 1, 10))
    message, tensors = channel.recv(WAIT_S)
    assert message == {"big": True}
    assert crc(tensors) == crc([big()])
    return 2 * len(STORED) + 1


def until_closed(work):
    """Runs work over and over; why the channel ended, and how long the last call took."""
    while True:
        begun = time.monotonic()
        try:
            work()
        except ChannelClosed as error:
            return str(error), time.monotonic() - begun


# What a peer does with its end


def exchange(channel):
    """Both directions at once, then the end."""
    sender = threading.Thread(target=send_pieces, args=(channel,))
    sender.start()
    right = check_pieces(channel)
    sender.join()
    return {"right": right}


def hang(channel):
    channel.send({"here": os.getpid()})
    time.sleep(3600)  # it is killed


def flood(channel):
    channel.send({"here": os.getpid()})
    while True:
        channel.send({}, [big()])


def dies_when_spoken_to(channel):
    """In the middle of its life: both are in the world, and bytes are under way."""
    channel.send({"here": os.getpid()})
    assert channel.recv(WAIT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def wait(channel):
    channel.send({"here": os.getpid()})
    why, _ = until_closed(lambda: channel.recv(WAIT_S))
    return {"why": why}


def push(channel):
    why, _ = until_closed(lambda: channel.send({}, [big()]))
    return {"why": why}


def connector(address, key, what, result):
    channel = connect(address.partition(":")[2], key.encode(), WAIT_S, WINDOW)
    said = globals()[what](channel)
    channel.close()
    report(result, said)


def listener(key, what, result):
    door = SharedMemoryListener(key.encode(), WINDOW)
    report(result + ".address", door.address)
    channel = door.accept(WAIT_S)
    said = globals()[what](channel)
    channel.close()
    door.close()
    report(result, said)


def rank(rank, store, what, result):
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=WAIT_S)
    )
    channel = DistChannel(DistGroup(), WINDOW)
    said = globals()[what](channel)
    channel.close()
    report(result, said)


def report(path, said):
    with open(path + ".new", "w") as file:
        json.dump(said, file)
    os.rename(path + ".new", path)


def main():
    torch.set_num_threads(1)
    shared_memory.HANDSHAKE_S = WAIT_S
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are reaped by themselves
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if (pid := os.fork()) == 0:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            try:
                globals()[job.pop("job")](**job)
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
