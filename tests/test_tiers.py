"""Tiers below the pool: bit exact on return, bounded, least recently used first, and never another prompt's block."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minillm.cache import block_file
from minillm.cache.pool import KVPool
from minillm.cache.tiers import Chain, DiskTier, HostTier, Link, Tiers, pack
from minillm.errors import MinillmError
from minillm.models.presets import preset

SMOL = preset("smollm2-135m")
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
DTYPES = [("float32", "auto"), ("bfloat16", "auto"), ("float16", "auto"), ("bfloat16", "int8"), ("float32", "fp8")]


def block(*values: int) -> list[torch.Tensor]:
    return [torch.tensor(values, dtype=torch.int64)]


def raw(payload) -> list[bytes]:
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in payload]


def held_by(pool) -> list[torch.Tensor]:
    """Every tensor of a pool; torch cannot fill or compare fp8, so its bytes."""
    held = [t for t in vars(pool).values() if isinstance(t, torch.Tensor)]
    return [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in held]


def random_pool(dtype, kv_dtype, device="cpu") -> KVPool:
    """All bit patterns, so NaNs with payloads, infinities and denormals too."""
    small = replace(SMOL, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
    pool = KVPool(small, 5, 4, getattr(torch, dtype), kv_dtype, device)
    generator = torch.Generator().manual_seed(0)
    for t in held_by(pool):
        bits = torch.randint(0, 256, (*t.shape[:-1], t.shape[-1] * t.element_size()), generator=generator)
        t[:, 1:] = bits.to(torch.uint8).view(t.dtype).to(device)[:, 1:]
    return pool


# The pool


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_a_block_leaves_the_pool_and_returns_to_the_bit(dtype, kv_dtype, device, tmp_path):
    pool = random_pool(dtype, kv_dtype, device)
    before = [raw([t[:, i].cpu() for t in held_by(pool)]) for i in range(6)]
    payloads = pool.read_blocks([4, 2])
    assert [raw(p) for p in payloads] == [before[4], before[2]]
    assert raw(pool.read_block(2)) == before[2]
    assert tuple((t.dtype, tuple(t.shape)) for t in payloads[0]) == pool.block_layout
    for t in payloads[0]:
        assert t.device.type == "cpu"
        assert t.untyped_storage().nbytes() == t.nbytes, "a payload must not keep more memory alive than it counts"
    disk = DiskTier(tmp_path, 1 << 20, pool.block_layout)
    for key, payload in ((b"four", payloads[0]), (b"two", payloads[1])):
        assert disk.put(key, (1, 2, 3, 4), payload)
    pool.write_blocks([1, 3], [disk.get(b"four", (1, 2, 3, 4)), disk.get(b"two", (1, 2, 3, 4))])
    pool.write_block(5, payloads[1])
    after = [raw([t[:, i].cpu() for t in held_by(pool)]) for i in range(6)]
    assert after == [before[0], before[4], before[2], before[2], before[4], before[2]]


def test_a_payload_is_not_a_window_on_the_pool():
    pool = random_pool("bfloat16", "auto")
    payload = pool.read_block(3)
    kept = raw(payload)
    pool.write_block(3, pool.read_block(1))
    assert raw(payload) == kept


@pytest.mark.parametrize("wrong", [0, -1, 6])
def test_only_blocks_of_the_pool_are_read_and_written(wrong):
    pool = random_pool("float32", "auto")
    with pytest.raises(MinillmError, match="1 to 5"):
        pool.read_block(wrong)
    with pytest.raises(MinillmError, match="1 to 5"):
        pool.write_block(wrong, pool.read_block(1))


def test_a_payload_that_does_not_fit_changes_nothing():
    pool = random_pool("float32", "auto")
    before = raw(held_by(pool))
    good = pool.read_block(1)
    for bad in (good[:1], [good[0].to(torch.bfloat16), good[1]], [good[0][:2], good[1]], [*good, good[0]]):
        with pytest.raises(MinillmError, match="no block of this pool"):
            pool.write_blocks([3, 2], [good, bad])
    with pytest.raises(MinillmError, match="its own"):
        pool.write_blocks([2, 2], [good, good])
    assert raw(held_by(pool)) == before
    assert pool.read_blocks([]) == []
    pool.write_blocks([], [])


# Keys


def test_a_key_is_the_namespace_and_the_whole_prefix(tmp_path):
    tiers = Tiers([HostTier(10_000), DiskTier(tmp_path, 100_000)])
    tiers.put(b"ns", (1, 2, 3, 4), block(1))
    for namespace, prefix in ((b"n", (1, 2, 3, 4)), (b"ns2", (1, 2, 3, 4)), (b"ns", (3, 4)), (b"ns", (1, 2, 3, 4, 5))):
        assert tiers.contains(namespace, prefix) is None
        assert tiers.get(namespace, prefix) is None
    for same in (pack([1, 2, 3, 4]), Link(b"", pack([1, 2, 3, 4]))):
        assert tiers.contains(b"ns", same) == "host", "packed or not, the key is the same"
    # Joined, these would be the same bytes.
    first, second = pack([1]), pack([2])
    tiers.put(b"a" + first, second, block(2))
    assert tiers.get(b"a", first + second) is None
    tiers.put(b"a", Link(first, second), block(2))
    assert tiers.get(b"a", Link(b"", first + second)) is None


LIVES = st.lists(st.tuples(st.sampled_from([b"me", b"you"]), st.lists(st.integers(0, 1), min_size=2, max_size=2)))


@given(one=LIVES, other=LIVES)
def test_two_chains_agree_as_far_as_tokens_and_readers_do(one, other):
    """The digest of a block stands for all before it: tokens, and who may read each of them."""

    def keys(life):
        tokens = [t for _, own in life for t in own]
        chain = Chain(2, lambda end: life[end // 2 - 1][0])
        return [chain.key(tokens, i) for i in range(len(life))], chain, tokens

    first, chain, tokens = keys(one)
    second = keys(other)[0]
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        same = one[: i + 1] == other[: i + 1]
        assert (a == b) == same
        assert (block_file.name_of(*a) == block_file.name_of(*b)) == same
    assert [chain.key(tokens, i) for i in range(len(one))] == first, "asked again, in any order"
    for i, (namespace, link) in enumerate(first):
        assert namespace == one[i][0]
        assert link.own == pack(one[i][1])
        assert link.parent == (block_file.digest_of(*first[i - 1]) if i else b"")


@pytest.mark.parametrize("mutant", [False, True])
def test_a_chain_hashes_each_token_once(monkeypatch, mutant):
    """Counted in bytes. Shown to notice a chain that begins at the first block for each key."""
    hashed = []
    sha256 = block_file.hashlib.sha256
    monkeypatch.setattr(block_file.hashlib, "sha256", lambda content: (hashed.append(len(content)), sha256(content))[1])

    def total(blocks):
        hashed.clear()
        tokens, chain = list(range(16 * blocks)), Chain(16, lambda end: b"ns")
        for i in range(blocks):
            (Chain(16, lambda end: b"ns") if mutant else chain).key(tokens, i)
        return sum(hashed)

    assert (total(200) < 2.1 * total(100)) != mutant
    assert (total(200) < 200 * 2 * (4 * 16 + 32)) != mutant


def test_what_is_kept_of_a_key_does_not_grow_with_the_prefix(tmp_path):
    host, disk = HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)
    tokens, chain = list(range(4 * 300)), Chain(4, lambda end: b"ns")
    sizes = []
    for i in (1, 2, 298, 299):
        for tier in (host, disk):
            before = tier.nbytes
            tier.put(*chain.key(tokens, i), block(i))
            sizes.append(tier.nbytes - before)
    assert len({*sizes[::2]}) == len({*sizes[1::2]}) == 1


def test_pack_takes_what_a_token_can_be():
    assert pack([1, 258]) == b"\1\0\0\0\2\1\0\0"
    for wrong in ([2**31], ["a"], [1.5], [None]):
        with pytest.raises(MinillmError, match="32 bits"):
            pack(wrong)


def test_the_longest_run_is_found_block_by_block(tmp_path):
    host, disk = HostTier(10_000), DiskTier(tmp_path, 100_000)
    tiers = Tiers([host, disk])
    tokens, chain, asked = list(range(16)), Chain(4, lambda end: b"ns"), []

    def keys(start=0):
        asked.clear()
        for i in range(start, 4):
            asked.append(i)
            yield chain.key(tokens, i)

    host.put(*chain.key(tokens, 0), block(0))
    disk.put(*chain.key(tokens, 1), block(1))
    assert tiers.match(keys()) == ["host", "disk"]
    assert asked == [0, 1, 2], "what follows a gap is not asked for"
    host.put(*chain.key(tokens, 2), block(2))
    assert tiers.match(keys()) == ["host", "disk", "host"]
    assert tiers.match(keys(1)) == ["disk", "host"]
    tiers.discard(*chain.key(tokens, 1))
    assert tiers.match(keys()) == ["host"]
    assert tiers.match([]) == []
    assert disk.nbytes == 0
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("mutant", [False, True])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_hash_collision_never_serves_another_prompt(tmp_path, monkeypatch, kind, mutant):
    """All keys get one name. Shown to fail where the keys themselves are not compared."""
    monkeypatch.setattr(block_file, "name_of", lambda namespace, prefix: "0" * 64)
    if mutant:
        monkeypatch.setattr(block_file, "same_key", lambda *a: True)
    tier = HostTier(100_000) if kind == "host" else DiskTier(tmp_path, 100_000)
    tier.put(b"alice", (1, 2), block(1))
    served = [tier.get(b"bob", (1, 2))]
    tier.put(b"alice", (1, 2), block(1))
    served.append(tier.get(b"alice", (1, 3)))
    assert any(p is not None for p in served) == mutant
    if not mutant:
        tier.put(b"alice", (1, 2), block(1))
        tier.put(b"bob", (1, 2), block(2))
        found = tier.get(b"bob", (1, 2))
        assert found is None or found[0].item() == 2
        assert len(tier) <= 1


@pytest.mark.parametrize("mutant", [False, True])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_equal_blocks_after_different_prefixes_are_told_apart_whatever_their_names(tmp_path, monkeypatch, kind, mutant):
    """One name for all keys: the parent's digest is compared. Shown to fail where only a block's own tokens are."""
    monkeypatch.setattr(block_file, "name_of", lambda namespace, prefix: "0" * 64)
    if mutant:
        monkeypatch.setattr(block_file, "same_key", lambda a, link, b, asked: a == b and link.own == asked.own)
    tier = HostTier(100_000) if kind == "host" else DiskTier(tmp_path, 100_000)
    mine, other = Chain(2, lambda end: b"ns"), Chain(2, lambda end: b"ns")
    tier.put(*mine.key([1, 2, 7, 7], 1), block(1))
    assert (tier.get(*other.key([1, 3, 7, 7], 1)) is not None) == mutant


# Bounds and order


class Model:
    """What one tier must do, written down in the plainest way."""

    def __init__(self, capacity):
        self.capacity, self.held = capacity, OrderedDict()

    def put(self, key, size):
        """The keys that leave."""
        if key in self.held:
            self.held.move_to_end(key)
            return []
        gone = []
        if size <= self.capacity:
            while sum(self.held.values()) + size > self.capacity:
                gone.append(self.held.popitem(last=False)[0])
            self.held[key] = size
        return gone


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize(("use", "saves"), [("get", True), ("touch", True), ("put", True), ("contains", False)])
def test_what_was_used_last_stays(tmp_path, kind, use, saves):
    tier = (
        HostTier(2 * 14)
        if kind == "host"
        else DiskTier(tmp_path, 2 * len(block_file.encode(b"ns", pack([0]), block(0))))
    )
    tier.put(b"ns", (0,), block(0))
    tier.put(b"ns", (1,), block(1))
    getattr(tier, use)(b"ns", (0,), *([block(0)] if use == "put" else []))
    tier.put(b"ns", (2,), block(2))
    assert [tier.contains(b"ns", (n,)) for n in range(3)] == [saves, not saves, True]
    assert tier.stats["evicted"] == 1


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "get", "contains", "discard", "touch"]), st.integers(0, 9)), max_size=60
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS, capacity=st.integers(60, 400))
def test_the_host_tier_is_bounded_and_forgets_the_least_recently_used(operations, capacity):
    tier, model = HostTier(capacity), Model(capacity)
    left = []
    tier.overflow = lambda namespace, prefix, payload: left.append(prefix)
    for what, n in operations:
        prefix, size = tuple(range(n + 1)), 8 * (n + 1) + 4 * (n + 1) + 2  # payload, packed prefix, namespace
        if what == "put":
            left.clear()
            kept = tier.put(b"ns", prefix, block(*prefix))
            assert left == [Link(b"", pack(range(i + 1))) for i in model.put(n, size)]
            assert kept == (n in model.held)
        elif what == "discard":
            tier.discard(b"ns", prefix)
            model.held.pop(n, None)
        elif what == "contains":
            assert tier.contains(b"ns", prefix) == (n in model.held)
        else:
            if what == "get":
                found = tier.get(b"ns", prefix)
                assert (found is not None) == (n in model.held)
                assert found is None or found[0].tolist() == list(prefix)
            else:
                assert tier.touch(b"ns", prefix) == (n in model.held)
            if n in model.held:
                model.held.move_to_end(n)
        assert tier.nbytes == sum(model.held.values()) <= capacity
        assert len(tier) == len(model.held)


@settings(max_examples=40, deadline=None)
@given(operations=OPERATIONS, room=st.integers(1, 5), reopen=st.integers(0, 60))
def test_the_disk_tier_is_bounded_and_forgets_the_least_recently_used(operations, room, reopen, tmp_path_factory):
    """And so it is across a restart, which keeps the files; their order is then that of writing."""
    folder = tmp_path_factory.mktemp("kv")
    sizes = {n: len(block_file.encode(b"ns", pack(range(n + 1)), block(*range(n + 1)))) for n in range(10)}
    capacity = room * max(sizes.values())
    tier, model, written = DiskTier(folder, capacity), Model(capacity), []
    for i, (what, n) in enumerate(operations):
        if i == reopen:
            tier.close()
            tier = DiskTier(folder, capacity)
            model.held = OrderedDict(sorted(model.held.items(), key=lambda item: written.index(item[0])))
        prefix = tuple(range(n + 1))
        if what == "put":
            if n not in model.held:
                written = [w for w in written if w != n] + [n]
            model.put(n, sizes[n])
            assert tier.put(b"ns", prefix, block(*prefix))
        elif what == "discard":
            tier.discard(b"ns", prefix)
            model.held.pop(n, None)
        elif what == "contains":
            assert tier.contains(b"ns", prefix) == (n in model.held)
        else:
            if what == "get":
                found = tier.get(b"ns", prefix)
                assert (found is not None) == (n in model.held)
                assert found is None or found[0].tolist() == list(prefix)
            else:
                assert tier.touch(b"ns", prefix) == (n in model.held)
            if n in model.held:
                model.held.move_to_end(n)
        on_disk = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        assert tier.nbytes == on_disk == sum(model.held.values()) <= capacity
    tier.close()


def test_the_host_overflows_to_the_disk_and_a_hit_there_stays_there(tmp_path):
    host, disk = HostTier(50), DiskTier(tmp_path, 100_000)
    tiers = Tiers([host, disk])
    for n in range(3):
        assert tiers.put(b"ns", (n,), block(n, n, n)) == "host"  # 24 + 4 + 2 bytes: one fits
    assert [tiers.contains(b"ns", (n,)) for n in range(3)] == ["disk", "disk", "host"]
    assert [tiers.get(b"ns", (n,))[0].tolist() for n in range(3)] == [[n] * 3 for n in range(3)]
    assert [tiers.contains(b"ns", (n,)) for n in range(3)] == ["disk", "disk", "host"]
    assert tiers.put(b"ns", (9,), block(*range(20))) == "disk", "too large for the host"
    assert tiers.stats["host"]["too_large"] == 1
    assert tiers.nbytes == host.nbytes + disk.nbytes
    assert len(tiers) == 4
    tiers.clear()
    assert len(tiers) == tiers.nbytes == 0
    assert not list(tmp_path.rglob("*.safetensors"))


def test_without_tiers_nothing_is_kept():
    tiers = Tiers([])
    assert tiers.put(b"ns", (1,), block(1)) is None
    assert tiers.get(b"ns", (1,)) is tiers.contains(b"ns", (1,)) is None
    assert tiers.match([(b"ns", (1, 2))]) == []
    assert tiers.first is None


def test_a_window_on_a_large_tensor_is_copied(tmp_path):
    """Else a bound on what is counted would bound nothing."""
    large = torch.arange(1000)
    windows = [large[4:8], large[6:16].reshape(2, 5).T]
    for tier in (HostTier(1000), DiskTier(tmp_path, 1000)):
        assert tier.put(b"", (1,), windows)
        kept = tier.get(b"", (1,))
        assert [t.tolist() for t in kept] == [t.tolist() for t in windows]
        assert [t.untyped_storage().nbytes() for t in kept] == [32, 80]


def test_a_put_looks_at_no_other_block(tmp_path, monkeypatch):
    """So its cost does not grow with what the tier holds: no listing, no reading, and one eviction for one arrival."""
    size = len(block_file.encode(b"ns", pack([0]), block(0)))
    disk = DiskTier(tmp_path, 50 * size)
    removed = []
    unlink = os.unlink
    monkeypatch.setattr(os, "scandir", lambda *a: pytest.fail("the folder was listed"))
    monkeypatch.setattr(os, "unlink", lambda path: (removed.append(path), unlink(path)))
    for n in range(200):
        disk.put(b"ns", (n,), block(n))
        assert len(removed) == max(0, n + 1 - 50)
    assert len(disk) == 50


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True, None])
def test_a_capacity_is_a_whole_number_of_bytes(capacity, tmp_path):
    with pytest.raises(MinillmError, match="capacity"):
        HostTier(capacity)
    with pytest.raises(MinillmError, match="capacity"):
        DiskTier(tmp_path, capacity)


# Files


def only_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.safetensors")
    return path


def test_files_are_private_and_their_names_say_nothing(tmp_path):
    before = os.umask(0)
    try:
        disk = DiskTier(tmp_path / "new" / "kv", 100_000)
        disk.put(b"tenant-alice", (11, 22, 33), block(5))
    finally:
        os.umask(before)
    path = only_file(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
    assert len(path.stem) == 64
    assert set(path.stem) <= set("0123456789abcdef")
    other = DiskTier(tmp_path / "b", 100_000)
    other.put(b"tenant-bob", (11, 22, 33), block(5))
    assert only_file(tmp_path / "b").stem != path.stem


def test_a_folder_open_to_others_is_closed_and_one_of_another_user_refused(tmp_path, monkeypatch):
    (tmp_path / "slot-0").mkdir(mode=0o777)
    disk = DiskTier(tmp_path, 1000)
    assert stat.S_IMODE((tmp_path / "slot-0").stat().st_mode) == 0o700
    disk.close()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(MinillmError, match="another user"):
        DiskTier(tmp_path, 1000)
    monkeypatch.undo()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "slot-0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MinillmError, match="another user|link"):
        DiskTier(tmp_path / "link", 1000)


def test_a_folder_that_cannot_be_used_is_told_at_the_door(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MinillmError, match="kv_disk_path"):
        DiskTier(tmp_path / "file" / "kv", 1000)
    with pytest.raises(MinillmError, match="kv_disk_path"):
        DiskTier(tmp_path / "file", 1000)


LAYOUT = ((torch.int64, (3,)), (torch.bfloat16, (2, 1)))


def two_tensors():
    bits = torch.tensor([[0x7FC1], [0x7F81]], dtype=torch.int32).to(torch.int16)  # NaNs with payloads
    return [torch.tensor([1, -2, 2**40]), bits.view(torch.bfloat16)]


@pytest.mark.parametrize("flip", [0x01, 0x20, 0xFF])
def test_every_byte_of_a_file_is_guarded(tmp_path, flip):
    """Each changed byte is noticed, or the tensors are what they were: then it was padding or a JSON blank."""
    disk = DiskTier(tmp_path, 100_000, LAYOUT)
    good = raw(two_tensors())
    disk.put(b"ns", (1, 2), two_tensors())
    content = only_file(tmp_path).read_bytes()
    harmless = 0
    for at in range(len(content)):
        disk.put(b"ns", (1, 2), two_tensors())
        path = only_file(tmp_path)
        path.write_bytes(content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :])
        found = disk.get(b"ns", (1, 2))
        if found is None:
            assert not path.exists(), "a bad file is dropped"
            assert disk.nbytes == 0
        else:
            assert raw(found) == good, f"byte {at}"
            assert tuple((t.dtype, tuple(t.shape)) for t in found) == LAYOUT
            harmless += 1
            disk.discard(b"ns", (1, 2))
    noticed = disk.stats["corrupted"]
    assert disk.stats["foreign"] == disk.stats["stale"] == 0, "damage is not taken for another key or layout"
    assert noticed + harmless == len(content)
    header = 8 + int.from_bytes(content[:8], "little")
    assert noticed >= len(content) - header, "every byte after the header counts"
    assert harmless <= 16, "only blanks at the header's end do not count"


def test_without_the_checksum_a_changed_byte_would_be_served(tmp_path, monkeypatch):
    """The mutation that the test above must notice."""
    monkeypatch.setattr(block_file, "_checksum", lambda *a: 0)
    disk = DiskTier(tmp_path, 100_000, LAYOUT)
    disk.put(b"ns", (1, 2), two_tensors())
    path = only_file(tmp_path)
    content = bytearray(path.read_bytes())
    at = content.index(b"".join(raw(two_tensors()[:1])))
    content[at] ^= 1
    path.write_bytes(content)
    assert raw(disk.get(b"ns", (1, 2))) != raw(two_tensors())


@pytest.mark.parametrize(("was", "becomes"), [(b'"I64","shape":[3]', b'"F64","shape":[3]'), (b"[2,1]", b"[1,2]")])
def test_the_checksum_covers_what_the_bytes_mean(tmp_path, was, becomes):
    disk = DiskTier(tmp_path, 100_000)
    disk.put(b"ns", (1, 2), two_tensors())
    content = only_file(tmp_path).read_bytes()
    assert was in content
    only_file(tmp_path).write_bytes(content.replace(was, becomes))
    assert disk.get(b"ns", (1, 2)) is None
    assert disk.stats["corrupted"] == 1


def test_a_file_cut_anywhere_or_grown_is_dropped(tmp_path):
    disk = DiskTier(tmp_path, 100_000, LAYOUT)
    disk.put(b"ns", (1, 2), two_tensors())
    content = only_file(tmp_path).read_bytes()
    noise = random.Random(0).randbytes(len(content))
    for wrong in [content[:n] for n in range(len(content))] + [content + b"\0", content * 2, noise]:
        disk.put(b"ns", (1, 2), two_tensors())
        only_file(tmp_path).write_bytes(wrong)
        assert disk.get(b"ns", (1, 2)) is None
        assert not list(tmp_path.rglob("*.safetensors"))
    disk.close()
    # Cut while no process ran: the size at the start is the wrong one.
    disk = DiskTier(tmp_path, 100_000, LAYOUT)
    disk.put(b"ns", (1, 2), two_tensors())
    disk.close()
    only_file(tmp_path).write_bytes(content[:-3])
    disk = DiskTier(tmp_path, 100_000, LAYOUT)
    assert disk.contains(b"ns", (1, 2))
    assert disk.get(b"ns", (1, 2)) is None
    assert disk.stats["corrupted"] == 1


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_bytes_make_the_reader_raise(data, tmp_path_factory):
    """Arbitrary bytes, and a sound file with some of its header replaced: `_decode` says no, never crashes."""
    sound = block_file.encode(b"ns", pack([1, 2]), two_tensors())
    if data.draw(st.booleans()):
        content = data.draw(st.binary(max_size=200))
    else:
        at = data.draw(st.integers(0, len(sound) - 1))
        part = data.draw(st.binary(max_size=12))
        content = sound[:at] + part + sound[at + len(part) :]
    try:
        payload = block_file.decode(content, b"ns", pack([1, 2]), LAYOUT)
    except block_file.UnusableError:
        return
    assert raw(payload) == raw(two_tensors())


@pytest.mark.parametrize("reason", ["missing", "unreadable"])
def test_a_file_that_is_gone_or_cannot_be_read_is_a_miss(tmp_path, monkeypatch, reason):
    disk = DiskTier(tmp_path, 100_000)
    disk.put(b"ns", (1,), block(1))
    if reason == "missing":
        only_file(tmp_path).unlink()
    else:
        monkeypatch.setattr(block_file, "read", lambda *a: (_ for _ in ()).throw(PermissionError("no")))
    assert disk.get(b"ns", (1,)) is None
    assert disk.stats[reason] == 1
    assert disk.nbytes == len(disk) == 0
    assert disk.get(b"ns", (1,)) is None
    assert disk.stats[reason] == 1


def test_another_link_in_place_of_a_file_is_not_followed(tmp_path):
    disk = DiskTier(tmp_path / "kv", 100_000)
    disk.put(b"ns", (1,), block(1))
    path = only_file(tmp_path / "kv")
    (tmp_path / "copy").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "copy")
    assert disk.get(b"ns", (1,)) is None
    assert (tmp_path / "copy").exists()


def test_a_file_of_another_layout_is_dropped(tmp_path):
    disk = DiskTier(tmp_path, 100_000, ((torch.int64, (1,)),))
    disk.put(b"ns", (1,), block(1))
    disk.close()
    for layout in (((torch.int64, (2,)),), ((torch.int32, (1,)),), ((torch.int64, (1,)),) * 2):
        disk = DiskTier(tmp_path, 100_000, layout)
        disk.put(b"ns", (1,), block(1))
        assert disk.get(b"ns", (1,)) is None
        assert disk.stats["stale"] == 1
        disk.close()


@pytest.mark.parametrize("half", [False, True])
def test_a_full_disk_drops_the_block_and_leaves_nothing_behind(tmp_path, monkeypatch, half):
    disk = DiskTier(tmp_path, 100_000)
    tiers = Tiers([HostTier(20), disk])
    tiers.put(b"ns", (1,), block(1))
    write = os.write

    def full(fd, content):
        if half:
            write(fd, bytes(content)[:7])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert tiers.put(b"ns", (2,), block(2)) == "host"  # block 1 overflows, and is lost
    assert tiers.put(b"ns", (3,), block(*range(9))) is None
    assert disk.stats["write_errors"] == 2
    assert disk.nbytes == 0
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and f.suffix != ".lock"]
    monkeypatch.undo()
    assert tiers.put(b"ns", (3,), block(*range(9))) == "disk"


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, content: write(fd, bytes(content)[:11]))
    disk = DiskTier(tmp_path, 100_000)
    assert disk.put(b"ns", (1,), block(7))
    assert disk.get(b"ns", (1,))[0].tolist() == [7]


def test_what_cannot_be_deleted_still_counts(tmp_path, monkeypatch):
    size = len(block_file.encode(b"ns", pack([0]), block(0)))
    disk = DiskTier(tmp_path, 2 * size)
    disk.put(b"ns", (0,), block(0))
    disk.put(b"ns", (1,), block(1))
    monkeypatch.setattr(os, "unlink", lambda path: (_ for _ in ()).throw(PermissionError("no")))
    assert not disk.put(b"ns", (2,), block(2))
    assert disk.nbytes == sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors")) == 2 * size


def test_a_folder_that_vanishes_costs_blocks_and_no_exception(tmp_path):
    import shutil

    disk = DiskTier(tmp_path / "kv", 100_000)
    disk.put(b"ns", (1,), block(1))
    shutil.rmtree(tmp_path / "kv")
    assert disk.get(b"ns", (1,)) is None
    assert not disk.put(b"ns", (2,), block(2))
    disk.discard(b"ns", (1,))
    disk.clear()


# Processes


def test_a_later_process_reuses_verified_files_within_its_bound(tmp_path):
    size = len(block_file.encode(b"ns", pack([0]), block(0)))
    first = DiskTier(tmp_path, 10 * size)
    for n in range(8):
        first.put(b"ns", (n,), block(n))
        os.utime(only := first._path(block_file.name_of(b"ns", pack([n]))), ns=(n * 10**9, n * 10**9))
    assert only.exists()
    (only.parent / f"{'a' * 64}.safetensors.part").write_bytes(b"half written")
    (only.parent / "notes.txt").write_text("not ours")
    first.close()
    assert not first.put(b"ns", (9,), block(9)), "closed"
    assert first.get(b"ns", (7,)) is None
    second = DiskTier(tmp_path, 3 * size)
    assert [n for n in range(8) if second.contains(b"ns", (n,))] == [5, 6, 7]
    assert second.get(b"ns", (6,))[0].tolist() == [6]
    assert second.get(b"other weights", (6,)) is None
    assert second.nbytes == 3 * size
    assert {f.name for f in only.parent.iterdir() if f.suffix != ".safetensors"} == {"notes.txt"}


CHILD = """
import sys, torch
from minillm.cache.tiers import DiskTier
tier = DiskTier(sys.argv[1], int(sys.argv[2]))
for n in range(20):
    tier.put(b"ns", (n,), [torch.tensor([n + 100])])
print(tier.nbytes, flush=True)
sys.stdin.read()
print(sum(tier.get(b"ns", (n,)) is not None for n in range(20)), tier.get(b"ns", (19,))[0].item(), flush=True)
"""


def test_two_processes_share_a_folder_without_meeting(tmp_path):
    """Each has a bound and files of its own; the slot of one that ended is taken over, and a spare one emptied."""
    size = len(block_file.encode(b"ns", pack([0]), block(0)))
    mine = DiskTier(tmp_path, 5 * size)
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(4 * size)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as child:
        assert int(child.stdout.readline()) == 4 * size
        for n in range(20):
            mine.put(b"ns", (n,), block(n))
        assert mine.get(b"ns", (19,))[0].item() == 19
        assert sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors")) == 9 * size
        child.stdin.close()
        assert child.stdout.readline().split() == ["4", "119"]
        assert child.wait() == 0
    third = DiskTier(tmp_path, 4 * size)
    assert third.get(b"ns", (19,))[0].item() == 119
    third.close()
    mine.close()
    only = DiskTier(tmp_path, 9 * size)
    assert only.get(b"ns", (19,))[0].item() == 19
    assert sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors")) == only.nbytes == 5 * size


def test_a_process_that_is_killed_leaves_whole_files_and_a_free_slot(tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path), "100000"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as child:
        child.stdout.readline()
        child.kill()
        child.wait()
    disk = DiskTier(tmp_path, 100_000)
    assert [disk.get(b"ns", (n,))[0].item() for n in range(20)] == list(range(100, 120))
