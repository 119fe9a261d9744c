"""One suite for every kind of channel: order, bits, back-pressure, an end that is noticed, and nothing left behind."""

import contextlib
import itertools
import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from channels import KEY, KINDS, WAIT_S, Waiting, ends, gloo_pair, in_parallel
from disagg_pair import until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_layout import STORED, full_pool

from minillm.cluster import frame
from minillm.cluster.distributed import DistChannel
from minillm.cluster.faulty import FaultyChannel
from minillm.cluster.transport import ChannelClosed, connect, listen
from minillm.errors import MinillmError

MB = 1 << 20
BETWEEN = ("shared-memory", "distributed")
fast = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def channel(kind):
    with ends(kind) as both:
        yield both


def bits(t):
    return t.dtype, tuple(t.shape), bytes(frame.as_bytes(t))


def noise(nbytes, seed=0):
    return torch.empty(nbytes, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(seed))


def test_messages_arrive_once_and_in_order_in_both_directions_at_once(channel):
    def talk(end, name):
        for n in range(200):
            end.send({"n": n, "from": name}, [torch.full((n % 7,), n)] * (n % 3))

    def hear(end):
        return [end.recv(WAIT_S) for _ in range(200)]

    one, two = channel
    heard = in_parallel(lambda: talk(one, 1), lambda: talk(two, 2), lambda: hear(one), lambda: hear(two))[2:]
    for got, name in zip(heard, (2, 1), strict=True):
        assert [m for m, _ in got] == [{"n": n, "from": name} for n in range(200)]
        assert all([t.tolist() for t in ts] == [[n] * (n % 7)] * (n % 3) for n, (_, ts) in enumerate(got))
        assert one.recv(0) is None
        assert two.recv(0) is None


@pytest.mark.parametrize("dtype", frame.DTYPES.values(), ids=str)
def test_tensors_arrive_to_the_bit(channel, dtype):
    """Of any shape: none, no dimension, an empty one, not contiguous; of every bit pattern, NaN too; larger than the
    wire."""
    wide = noise(24 * 40 * dtype.itemsize).view(dtype).view(24, 40)
    big = noise(2 * MB + 8 * dtype.itemsize, 1).view(dtype)
    given = [wide, wide.t(), wide[3:9:2, 5:], wide[0, 0], wide[:0], wide[:, :0, None], big, wide.flatten()[1:2]]
    (_, heard) = in_parallel(lambda: channel[0].send({}, given), lambda: channel[1].recv(WAIT_S))
    assert [bits(t) for t in heard[1]] == [bits(t) for t in given]
    assert channel[1].recv(0) is None


@pytest.mark.parametrize(("dtype", "kv_dtype"), STORED)
def test_kv_of_every_dtype_moves_from_pool_to_pool(channel, dtype, kv_dtype):
    source, target = full_pool(dtype, kv_dtype), full_pool(dtype, kv_dtype, seed=1)
    for layer in range(2):
        channel[0].send({"layer": layer}, source.read_tokens(layer, [3, 8, 1], 2, 9))
    for _ in range(2):
        message, tensors = channel[1].recv(WAIT_S)
        target.write_tokens(message["layer"], [5, 6, 7], 2, tensors)
    for layer in range(2):
        want, got = source.read_tokens(layer, [3, 8, 1], 2, 9), target.read_tokens(layer, [5, 6, 7], 2, 9)
        assert [bits(t) for t in got] == [bits(t) for t in want]


def test_what_was_sent_may_be_changed_at_once_and_what_came_belongs_to_who_received_it(channel):
    x = torch.arange(1000.0, requires_grad=True)
    message = {"ids": [1, 2]}
    channel[0].send(message, [x, x])
    with torch.no_grad():
        x.zero_()
    message["ids"].append(3)
    heard, (a, b) = channel[1].recv(WAIT_S)
    a[0] = 7
    assert heard == {"ids": [1, 2]}
    assert b.tolist() == list(range(1000))
    assert not a.requires_grad


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_any_json_is_a_message(kind):
    with ends(kind) as (one, two):

        @fast
        @given(st.dictionaries(st.text(max_size=5), json_values, max_size=5))
        def any_message(message):
            one.send(message)
            heard = two.recv(WAIT_S)
            assert heard == (message, [])
            assert json.dumps(heard[0]) == json.dumps(message)

        any_message()


NO_MESSAGES = [
    (["a"], (), "a dict of JSON values, got list"),
    ({"x": float("nan")}, (), "JSON values only"),
    ({"x": float("inf")}, (), "JSON values only"),
    ({"x": b"bytes"}, (), "JSON values only"),
    ({"x": {1, 2}}, (), "JSON values only"),
    ({(1, 2): 3}, (), "JSON values only"),
    ({"x": torch.zeros(1)}, (), "JSON values only"),
    ({}, [torch.zeros(1, dtype=torch.complex64)], "complex64 .* cannot be sent; dtypes: float32"),
    ({}, [torch.zeros(1, dtype=torch.bool)], "bool .* cannot be sent"),
    ({}, [torch.zeros([1] * 9)], "9 dimensions cannot be sent"),
    ({}, [torch.zeros(1)] * 1025, "at most 1024 tensors, got 1025"),
    ({}, [torch.zeros(1).expand(1 << 29)], "send it in pieces"),
    ({"x": "a" * (16 * MB)}, (), "send it in pieces"),
]


@pytest.mark.parametrize(("message", "tensors", "words"), NO_MESSAGES, ids=range(len(NO_MESSAGES)))
def test_what_can_be_no_message_is_refused_and_the_channel_goes_on(channel, message, tensors, words):
    with pytest.raises(MinillmError, match=words) as error:
        channel[0].send(message, tensors)
    assert not isinstance(error.value, ChannelClosed)
    channel[0].send({"next": 1})
    assert channel[1].recv(WAIT_S) == ({"next": 1}, [])


def test_a_message_that_contains_itself_is_refused(channel):
    message = {}
    message["me"] = message
    with pytest.raises(MinillmError, match="JSON values only"):
        channel[0].send(message)


def test_who_sends_faster_than_the_other_reads_waits_and_holds_a_bounded_number_of_bytes(kind):
    """The wire holds four such messages at most. Nothing is lost, and nothing moves until somebody reads."""
    with ends(kind, window=MB) as (one, two):
        sent = []

        def send_all():
            for n in range(30):
                one.send({"n": n}, [noise(MB // 4, n)])
                sent.append(n)

        sender = Waiting(send_all)
        until(lambda: len(sent) >= 2)
        assert sender.waits(0.3)
        assert 2 <= len(sent) <= 4
        for n in range(30):
            assert len(sent) <= n + 5
            message, (x,) = two.recv(WAIT_S)
            assert message == {"n": n}
            assert bits(x) == bits(noise(MB // 4, n))
        assert sender.ended() is None


def test_messages_larger_than_the_wire_go_through_both_ways_at_once(kind):
    with ends(kind, window=64 << 10) as (one, two):
        big = [noise(3 * MB + 1, seed) for seed in range(2)]
        heard = in_parallel(
            lambda: one.send({}, [big[0]]),
            lambda: two.send({}, [big[1]]),
            lambda: one.recv(WAIT_S),
            lambda: two.recv(WAIT_S),
        )[2:]
        assert [bits(h[1][0]) for h in heard] == [bits(big[1]), bits(big[0])]


def test_messages_of_several_threads_stay_whole(kind):
    with ends(kind, window=64 << 10) as (one, two):

        def send_some(who):
            for n in range(15):
                one.send({"who": who, "n": n}, [torch.full((20_000,), who, dtype=torch.uint8), noise(n, who)])

        heard = in_parallel(
            *[lambda who=who: send_some(who) for who in range(4)], lambda: [two.recv(WAIT_S) for _ in range(60)]
        )[-1]
        for who in range(4):
            mine = [(m["n"], ts) for m, ts in heard if m["who"] == who]
            assert [n for n, _ in mine] == list(range(15))
            assert all(ts[0].eq(who).all() and bits(ts[1]) == bits(noise(n, who)) for n, ts in mine)


def test_a_message_that_comes_slowly_is_put_together_over_many_calls(kind):
    with ends(kind, window=64 << 10) as (one, two):
        x = noise(2 * MB)
        sender = Waiting(lambda: one.send({"slow": True}, [x[:1], x, x[:0]]))
        heard, end = None, time.monotonic() + WAIT_S
        while heard is None:
            heard = two.recv(0)
            assert time.monotonic() < end
            time.sleep(0)  # it is the other's turn
        assert sender.ended() is None
        assert [bits(t) for t in heard[1]] == [bits(x[:1]), bits(x), bits(x[:0])]


def test_nothing_within_the_time_is_none(channel):
    assert channel[0].recv(0) is None
    assert channel[1].recv(0.01) is None
    assert channel[0].closed is None


def test_a_reader_that_never_reads_ends_the_channel(kind):
    with ends(kind, window=64 << 10, stall_s=0.2) as (one, two):
        sender = Waiting(lambda: [one.send({}, [noise(32 << 10)]) for _ in range(10)])
        assert "the other side has read nothing for 0.2 s" in str(sender.ended())
        assert one.closed == str(sender.ended())
        with pytest.raises(ChannelClosed):
            all(two.recv(WAIT_S) for _ in range(10))


# The end


@pytest.mark.parametrize("closer", [0, 1])
def test_who_waits_to_receive_hears_of_the_end_at_once(channel, closer):
    """At either end, whoever closes. The time to wait is far longer than the test may take."""
    readers = [Waiting(lambda end=end: end.recv(1000)) for end in channel]
    assert all(reader.waits() for reader in readers)
    channel[closer].close()
    for reader in readers:
        assert isinstance(reader.ended(), ChannelClosed)
        assert "closed" in str(reader.ended())


@pytest.mark.parametrize("closer", [0, 1])
def test_who_waits_to_send_hears_of_the_end_at_once(kind, closer):
    with ends(kind, window=64 << 10, stall_s=1000) as channel:
        sender = Waiting(lambda: [channel[0].send({}, [noise(MB)]) for _ in range(2)])
        assert sender.waits()
        channel[closer].close()
        assert isinstance(sender.ended(), ChannelClosed)


def test_after_the_end_nothing_is_sent_or_received(channel):
    channel[0].close()
    channel[0].close()
    for end in channel:
        with pytest.raises(ChannelClosed):
            end.recv(WAIT_S)
        with pytest.raises(ChannelClosed):
            end.send({})
        assert end.closed
        end.close()


def test_what_was_sent_before_the_end_still_arrives(channel):
    """Even though the other direction is full of what nobody has read; who closed reads no more."""
    one, two = channel
    two.send({"unread": 1}, [noise(1000)])
    for n in range(5):
        one.send({"n": n}, [noise(50_000, n)])
    one.close()
    with pytest.raises(ChannelClosed):
        one.recv(0)
    for n in range(5):
        message, (x,) = two.recv(WAIT_S)
        assert message == {"n": n}
        assert bits(x) == bits(noise(50_000, n))
    with pytest.raises(ChannelClosed, match="closed"):
        two.recv(WAIT_S)


@pytest.mark.parametrize("kind", BETWEEN)
def test_a_message_that_breaks_off_is_said_to(kind):
    with ends(kind, window=64 << 10) as (one, two):
        sender = Waiting(lambda: one.send({}, [noise(MB)]))
        until(lambda: two._ready)  # it has begun to arrive, and not all of it can
        one.close()
        assert isinstance(sender.ended(), ChannelClosed)
        with pytest.raises(ChannelClosed, match="in the middle of a message"):
            two.recv(WAIT_S)


def test_closing_while_a_message_comes_in_gives_the_whole_of_it_or_the_end(kind):
    x = noise(MB)
    for _ in range(5):
        with ends(kind, window=64 << 10) as (one, two):
            sender = Waiting(lambda one=one: [one.send({}, [x]) for _ in itertools.count()])
            heard = two.recv(WAIT_S)
            reader = Waiting(lambda two=two: [two.recv(1000) and None for _ in itertools.count()])
            two.close()
            assert bits(heard[1][0]) == bits(x)
            assert isinstance(sender.ended(), ChannelClosed)
            assert isinstance(reader.ended(), ChannelClosed)


def held():
    """What of this process a channel could have left: threads, descriptors, mappings."""
    threads = {t for t in threading.enumerate() if t.name.startswith("minillm")}
    if not os.path.exists("/proc/self/maps"):
        return threads, set(), set()
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed by now
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/maps") as maps:
        mapped = {line for line in maps if "minillm-kv" in line}
    return threads, {link for link in links if "socket" in link or "minillm" in link}, mapped


def test_nothing_is_left_of_a_channel(kind):
    """Nothing that was not there before: what other tests have left may go meanwhile."""
    gloo_pair()  # its sockets stay
    before = held()

    def new():
        return [now - then for now, then in zip(held(), before, strict=True)]

    for round in range(3):
        with ends(kind) as (one, two):
            one.send({}, [noise(1000)])
            if round:
                two.recv(WAIT_S)
            if kind == "shared-memory":
                assert len(new()[2]) in (0, 4)  # two rings, mapped at both ends
        until(lambda: not any(new()))


# What comes is judged


def whole(header, payload=b"", magic=frame.MAGIC, said=None, announced=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    sizes = len(text) if said is None else said, len(payload) if announced is None else announced
    return frame.PREFIX.pack(magic, *sizes) + text + payload


def one_tensor(*spec, nbytes=8):
    return whole({"message": {}, "tensors": [list(spec)]}, b"x" * nbytes)


HOSTILE = [
    (whole({"message": {}, "tensors": []}, magic=b"HTTP"), "begins with b'HTTP'"),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "this is no frame"),
    (whole(b"", said=0xFFFFFFFF), "a frame has at most"),
    (whole(b"", announced=1 << 63), "a frame has at most"),
    (whole(b""), "not what it should be"),
    (whole(b"{"), "not what it should be"),
    (whole(b"\xff\xfe\x00"), "not what it should be"),
    (whole(b"[" * 200_000), "not what it should be"),
    (whole(b"9" * 5000), "not what it should be"),
    (whole(b'{"message": {}}'), "not what it should be"),
    (whole([]), "not what it should be"),
    (whole(None), "not what it should be"),
    (whole({"message": 1, "tensors": []}), "holds a message"),
    (whole({"message": {}, "tensors": {}}), "holds a message"),
    (whole({"message": {}, "tensors": [["int8", [0]]] * 1025}), "at most 1024 tensors"),
    (one_tensor("float32", [-2]), "sizes of a tensor are from 0"),
    (one_tensor("float32", [-1, -2]), "sizes of a tensor are from 0"),
    (one_tensor("float32", [2.0]), "sizes of a tensor are from 0"),
    (one_tensor("float32", ["2"]), "sizes of a tensor are from 0"),
    (one_tensor("int8", [8, True]), "sizes of a tensor are from 0"),
    (one_tensor("float32", [1 << 62]), "sizes of a tensor are from 0"),
    (one_tensor("float32", [1 << 30] * 8), "it announced 8"),
    (one_tensor("float32", [3]), "take 12 bytes, and it announced 8"),
    (one_tensor("float32", [1]), "take 4 bytes, and it announced 8"),
    (one_tensor("float32", [1] * 9), "9 dimensions cannot be received"),
    (one_tensor("object", [1]), "cannot be received"),
    (one_tensor("complex64", [1]), "cannot be received"),
    (one_tensor("float32", 2), "announced as"),
    (one_tensor(["float32"], [2]), "announced as"),
    (one_tensor("float32", [2], 3), "announced as"),
    (whole({"message": {}, "tensors": [None]}), "announced as"),
]


def put(end, data):
    """Bytes that are no message, as a process that has the key could send them."""
    end._put(memoryview(data))
    end._flush()


@pytest.mark.parametrize("kind", BETWEEN)
@pytest.mark.parametrize(("data", "words"), HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_message_ends_the_channel_in_words_at_both_ends(kind, data, words):
    with ends(kind) as (one, two):
        one.send({"good": 1})
        put(one, data)
        assert two.recv(WAIT_S) == ({"good": 1}, [])
        with pytest.raises(ChannelClosed, match=words):
            two.recv(WAIT_S)
        with pytest.raises(ChannelClosed, match=words):
            two.send({})
        with pytest.raises(ChannelClosed):
            one.recv(WAIT_S)


@pytest.mark.parametrize("kind", BETWEEN)
def test_no_bytes_at_all_make_a_channel_raise_anything_else(kind):
    @settings(max_examples=30, deadline=None)
    @given(st.binary(max_size=60), st.sampled_from([data for data, _ in HOSTILE]) | st.none(), st.integers(0, 60))
    def any_bytes(random, known, at):
        data = random if known is None else known[:at] + random + known[at + len(random) :]
        with ends(kind, window=256 << 10) as (one, two):
            put(one, data[: 200 << 10]) if data else None
            try:
                heard = two.recv(0.005)
            except ChannelClosed:
                return
            assert heard is None or isinstance(heard[0], dict)

    any_bytes()


@pytest.mark.parametrize(("kind", "packet"), [
    ("shared-memory", lambda end: end._tell(b"w", (1 << 20) + 1)),
    ("shared-memory", lambda end: end._tell(b"w", (1 << 64) - 1)),
    ("shared-memory", lambda end: end._tell(b"r", 1)),
    ("shared-memory", lambda end: end._tell(b"?", 1)),
    ("shared-memory", lambda end: end._sock.sendall(b"x" * 9)),
    ("distributed", lambda end: [end._post(b"d" + (1 << 20).to_bytes(8, "little")) for _ in range(2)]),
    ("distributed", lambda end: end._post(b"d" + b"\xff" * 8)),
    ("distributed", lambda end: end._post(b"r" + (1).to_bytes(8, "little"))),
    ("distributed", lambda end: end._post(b"??")),
    ("distributed", lambda end: end._post(b"x" * 9)),
])  # fmt: skip
def test_counts_that_cannot_be_end_the_channel(kind, packet):
    """More bytes than the memory has, credit that was never spent, words that mean nothing."""
    with ends(kind, window=MB) as (one, two):
        packet(one)
        until(lambda: two.closed is not None)
        assert "not this protocol" in (two.closed or "it goes on")
        with pytest.raises(ChannelClosed):
            all(two.recv(WAIT_S) for _ in range(10))
        with pytest.raises(ChannelClosed):
            one.recv(WAIT_S)


def test_a_channel_over_torch_needs_a_gloo_world_of_two():
    import copy

    group = copy.copy(gloo_pair()[0])
    group.size = 3
    with pytest.raises(MinillmError, match="joins 2 ranks, and this group has 3"):
        DistChannel(group)
    group.size, group._group = (
        2,
        type("Nccl", (), {"_get_backend": lambda self, device: self, "name": lambda self: "nccl"})(),
    )
    with pytest.raises(MinillmError, match="needs a gloo group"):
        DistChannel(group)


def test_a_rank_does_not_keep_what_it_has_sent_for_ever():
    """`DistGroup.send`, of which pipelines are made: gloo's work is not done by itself, even if all has arrived."""
    from minillm.parallel import group as groups

    (sender, receiver) = (world._group._get_backend(None) for world in gloo_pair())
    one = groups.DistGroup.__new__(groups.DistGroup)
    one.rank, one.size, one.ranks, one._group, one._sending, one.traffic = 0, 2, [0, 1], None, [], groups.Traffic()
    one._dist = SimpleNamespace(isend=lambda x, dst, group: sender.send([x], dst, 3))
    x = torch.zeros(4)
    for n in range(3 * groups.MOST_UNDER_WAY):
        one.send(torch.full((4,), float(n)), 1)
        receiver.recv([x], 0, 3).wait()
        assert x.tolist() == [n] * 4
        assert len(one._sending) <= groups.MOST_UNDER_WAY
    for work, _ in one._sending:
        work.wait()


# The door


@pytest.fixture(params=["in-process", "shared-memory"])
def door(request):
    listener = listen(request.param, KEY)
    yield listener
    listener.close()


def test_who_has_the_key_gets_a_channel_of_their_own(door):
    pairs = [(connect(door.address, KEY), door.accept(WAIT_S)) for _ in range(3)]
    for n, (there, here) in enumerate(pairs):
        there.send({"n": n})
        here.send({"back": n})
    for n, (there, here) in enumerate(pairs):
        assert here.recv(WAIT_S) == ({"n": n}, [])
        assert there.recv(WAIT_S) == ({"back": n}, [])
        there.close()
        here.close()


@pytest.mark.parametrize("key", [b"", b"another", KEY + b"x", KEY[:-1], b"\0"])
def test_another_key_opens_nothing(door, key):
    with pytest.raises(ChannelClosed, match="key"):
        connect(door.address, key)
    assert door.accept(0.05) is None
    mine = connect(door.address, KEY)
    door.accept(WAIT_S).close()
    mine.close()


def test_a_door_that_is_closed_is_said_to_be(door):
    waiting = Waiting(lambda: door.accept(1000))
    assert waiting.waits()
    door.close()
    door.close()
    assert isinstance(waiting.ended(), ChannelClosed)
    with pytest.raises(ChannelClosed):
        door.accept(0)
    with pytest.raises(ChannelClosed, match=r"nobody listens|no channel to"):
        connect(door.address, KEY)


def test_channels_outlive_the_door_they_came_through(door):
    mine = connect(door.address, KEY)
    theirs = door.accept(WAIT_S)
    door.close()
    mine.send({"still": 1})
    assert theirs.recv(WAIT_S) == ({"still": 1}, [])
    mine.close()
    theirs.close()


def test_who_was_not_let_in_before_the_door_closed_hears_of_it(door):
    mine = connect(door.address, KEY)
    until(lambda: door._arrived._waiting)
    door.close()
    with pytest.raises(ChannelClosed):
        mine.recv(WAIT_S)
    mine.close()


def test_who_is_never_let_in_is_one_of_a_few(door):
    """Peers that have the key and come again and again do not pile up where nobody accepts them."""
    door._arrived._backlog = 2
    waiting = []
    for _ in range(2):
        waiting.append(connect(door.address, KEY))
        until(lambda: len(door._arrived._waiting) == len(waiting))
    with pytest.raises(ChannelClosed):
        connect(door.address, KEY).recv(WAIT_S)
    assert len(door._arrived._waiting) == 2
    for mine in waiting:
        theirs = door.accept(WAIT_S)
        mine.send({"still": 1})
        assert theirs.recv(WAIT_S) == ({"still": 1}, [])
        mine.close()
        theirs.close()


@pytest.mark.parametrize("address", ["", "unix:", "tcp:1.2.3.4", "in-process", "unix", "/tmp/x"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(MinillmError, match='an address is "in-process:NAME" or "unix:/PATH"'):
        connect(address, KEY)


@pytest.mark.parametrize("address", ["unix:/nowhere/at/all", "unix:@nobody", "in-process:nobody", "unix:/" + "a" * 300])
def test_nobody_at_an_address_is_said(address):
    with pytest.raises(ChannelClosed, match=r"nobody listens|no channel to"):
        connect(address, KEY)


def test_a_door_needs_a_key_and_a_known_kind():
    with pytest.raises(MinillmError, match="needs a key"):
        listen("in-process", b"")
    with pytest.raises(MinillmError, match='"in-process" or "shared-memory"'):
        listen("carrier-pigeon", KEY)


# Faults on purpose


def heard_of(faults, count=4, release=False):
    with ends("in-process") as (one, two):
        faulty = FaultyChannel(one, faults)
        try:
            for n in range(count):
                faulty.send({"n": n}, [torch.full((3,), n, dtype=torch.uint8)])
        except ChannelClosed:
            pass
        if release:
            faulty.release()
        got = []
        try:
            while (message := two.recv(0)) is not None:
                got.append((message[0]["n"], message[1][0].tolist()))
        except ChannelClosed:
            got.append("closed")
        return got, [(s.at, s.fault) for s in faulty.struck]


def test_faults_strike_the_message_that_was_named_and_no_other():
    right = [(n, [n] * 3) for n in range(4)]
    assert heard_of({}) == (right, [])
    assert heard_of({1: "drop"}) == ([right[0], *right[2:]], [(1, "drop")])
    assert heard_of({1: "duplicate"}) == ([*right[:2], *right[1:]], [(1, "duplicate")])
    assert heard_of({1: "corrupt"}) == ([right[0], (1, [1, 0, 1]), *right[2:]], [(1, "corrupt")])
    assert heard_of({2: "delay"}) == (right[:2], [(2, "delay")])
    assert heard_of({2: "delay"}, release=True) == (right, [(2, "delay")])
    assert heard_of({2: "close"}) == ([*right[:2], "closed"], [(2, "close")])
    assert heard_of({9: "close"}) == (right, [])
    with pytest.raises(MinillmError, match="faults are drop, delay, corrupt, duplicate, close; got explode"):
        FaultyChannel(None, {0: "explode"})


def test_a_corrupt_message_without_tensors_says_nothing_any_more():
    with ends("in-process") as (one, two):
        FaultyChannel(one, {0: "corrupt"}).send({"type": "ack", "id": 1})
        assert two.recv(0) == ({"type": None, "id": None}, [])


def test_a_fault_leaves_the_sender_s_own_tensors_alone():
    with ends("in-process") as (one, two):
        x = torch.zeros(4)
        FaultyChannel(one, {0: "corrupt"}).send({}, [x[:1], x])
        first, second = two.recv(0)[1]
        assert not x.any()
        assert not first.any()
        assert second.any()
