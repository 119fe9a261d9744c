"""Where KV lies: tokens in and out of a pool, blocks of another size, heads split and joined, and what is refused."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.cache.pool import KVPool
from minillm.cluster.layout import (
    KVLayout,
    blocks_from_pieces,
    to_token_pieces,
    why_not,
)
from minillm.cluster.ticket import Ticket, new_epoch, token_hash
from minillm.config import ModelConfig
from minillm.errors import MinillmError

CONFIG = ModelConfig(num_layers=2, num_heads=6, num_kv_heads=3, head_dim=4, hidden_size=24)
LAYOUT = KVLayout(2, 3, 4, "float32", "auto", 16, 1, "m")
STORED = [("float32", "auto"), ("bfloat16", "auto"), ("float16", "auto"), ("float32", "int8"), ("bfloat16", "fp8")]


def full_pool(dtype="float32", kv_dtype="auto", block_size=4, num_blocks=12, seed=0, config=CONFIG):
    """Every bit pattern there is, NaN and infinities too."""
    pool = KVPool(config, num_blocks, block_size, getattr(torch, dtype), kv_dtype)
    noise = torch.Generator().manual_seed(seed)
    for t in pool._stored:
        t[:, 1:].view(torch.uint8).random_(generator=noise)
    return pool


def bits(tensors):
    return [t.contiguous().view(torch.uint8).tolist() for t in tensors]


def sequence(pool, layer, ids, start, count):
    """The same by hand, token by token."""
    places = [(ids[n // pool.block_size], n % pool.block_size) for n in range(start, start + count)]
    return [torch.stack([t[layer, i, at] for i, at in places]) for t in pool._stored]


@pytest.mark.parametrize(("dtype", "kv_dtype"), STORED)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 12), (3, 1), (3, 2), (4, 4), (5, 6), (11, 1)])
def test_tokens_go_in_and_out_of_a_pool_to_the_bit(dtype, kv_dtype, start, count):
    source, target = full_pool(dtype, kv_dtype), full_pool(dtype, kv_dtype, seed=1)
    ids, others = [7, 2, 11], [4, 12, 1]
    for layer in range(2):
        taken = source.read_tokens(layer, ids, start, count)
        assert bits(taken) == bits(sequence(source, layer, ids, start, count))
        before = [t.clone() for t in target._stored]
        target.write_tokens(layer, others, start, taken)
        assert bits(sequence(target, layer, others, start, count)) == bits(taken)
        for t, was in zip(target._stored, before, strict=True):  # and nothing else was touched
            now = t.clone()
            for n in range(start, start + count):
                now[layer, others[n // 4], n % 4] = was[layer, others[n // 4], n % 4]
            assert bits([now]) == bits([was])


def test_what_read_tokens_gives_is_a_copy():
    pool = full_pool()
    taken = pool.read_tokens(0, [1], 0, 4)
    kept = bits(taken)
    pool.k.zero_()
    assert bits(taken) == kept


def test_no_tokens_are_no_work():
    pool = full_pool()
    assert [t.shape[0] for t in pool.read_tokens(0, [1], 4, 0)] == [0, 0]
    pool.write_tokens(0, [1], 2, pool.read_tokens(0, [1], 0, 0))


@pytest.mark.parametrize(
    ("layer", "ids", "start", "count", "words"),
    [
        (2, [1], 0, 1, "layers are 0 to 1"),
        (-1, [1], 0, 1, "layers are 0 to 1"),
        (0, [1], -1, 1, "hold tokens 0 to 3"),
        (0, [1], 3, 2, "hold tokens 0 to 3"),
        (0, [1], 0, -1, "hold tokens 0 to 3"),
        (0, [0], 0, 1, "0 is padding"),
        (0, [13], 0, 1, "blocks are 1 to 12"),
        (0, [3, 3], 2, 4, "names each block once"),
    ],
)
def test_tokens_outside_the_table_or_the_pool_are_refused(layer, ids, start, count, words):
    with pytest.raises(MinillmError, match=words):
        full_pool().read_tokens(layer, ids, start, count)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p[:1],
        lambda p: [p[0], p[1][:1]],
        lambda p: [p[0].to(torch.float16), p[1]],
        lambda p: [p[0][:, :2], p[1][:, :2]],
        lambda p: [p[0][0], p[1][0]],
        lambda p: [],
        lambda p: [torch.tensor(1.0), torch.tensor(1.0)],
        lambda p: [*p, p[0]],
    ],
)
def test_tokens_of_another_shape_are_refused_and_nothing_is_written(change):
    pool = full_pool()
    pieces, before = pool.read_tokens(0, [1], 0, 2), bits(pool._stored)
    with pytest.raises(MinillmError, match="no tokens of this pool"):
        pool.write_tokens(0, [2], 0, change(pieces))
    assert bits(pool._stored) == before


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(STORED), st.sampled_from([(16, 64), (64, 16), (16, 16), (16, 24)]), st.integers(1, 150), st.data()
)
def test_kv_is_laid_out_anew_for_another_block_size(stored, sizes, num_tokens, data):
    """From a pool with blocks of one size to one with another, by blocks and by pieces, to the bit."""
    source_size, target_size = sizes
    needed = [-(-num_tokens // size) for size in sizes]
    source = full_pool(*stored, block_size=source_size, num_blocks=needed[0] + 2)
    target = full_pool(*stored, block_size=target_size, num_blocks=needed[1] + 2, seed=1)
    ids = data.draw(st.permutations(range(1, needed[0] + 3)))[: needed[0]]
    others = data.draw(st.permutations(range(1, needed[1] + 3)))[: needed[1]]
    pieces = to_token_pieces(source.read_blocks(ids), num_tokens)
    target.write_blocks(others, blocks_from_pieces(pieces, target_size))
    for layer in range(2):
        want = source.read_tokens(layer, ids, 0, num_tokens)
        assert bits(pieces[layer]) == bits(want)
        assert bits(target.read_tokens(layer, others, 0, num_tokens)) == bits(want)
    back = to_token_pieces(target.read_blocks(others), num_tokens)
    assert [bits(p) for p in back] == [bits(p) for p in pieces]


@pytest.mark.parametrize("num_tokens", [0, -1, 9])
def test_pieces_of_more_tokens_than_the_blocks_hold_are_refused(num_tokens):
    with pytest.raises(MinillmError, match="hold 1 to 8 tokens"):
        to_token_pieces(full_pool().read_blocks([1, 2]), num_tokens)


def test_pieces_that_are_not_alike_are_refused():
    pieces = to_token_pieces(full_pool().read_blocks([1, 2]), 7)
    for wrong in ([], [[], []], [pieces[0], pieces[1][:1]], [pieces[0], [t[:3] for t in pieces[1]]]):
        with pytest.raises(MinillmError, match="as many tensors and tokens"):
            blocks_from_pieces(wrong, 4)


def test_heads_that_cannot_be_shared_are_refused():
    with pytest.raises(MinillmError, match="3 KV heads cannot be shared by 2 ranks"):
        dataclasses.replace(LAYOUT, tp_size=2)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_layers", 30, "another number of layers: num_layers 30 there, 2 here"),
        ("num_kv_heads", 6, "another number of KV heads: num_kv_heads 6 there, 3 here"),
        ("head_dim", 8, "another head size: head_dim 8 there, 4 here"),
        ("dtype", "bfloat16", "another dtype, and converted ones would give other tokens: dtype bfloat16 there"),
        ("kv_dtype", "int8", "a KV cache of another dtype"),
        ("model", "n", "another model, or the same one with other weights"),
    ],
)
def test_a_layout_that_stands_for_something_else_is_refused_in_words(field, value, words):
    assert words in why_not(dataclasses.replace(LAYOUT, **{field: value}), LAYOUT)


def test_a_layout_of_other_blocks_and_ranks_is_laid_out_anew():
    assert why_not(LAYOUT, LAYOUT) is None
    assert why_not(dataclasses.replace(LAYOUT, block_size=64, tp_size=3), LAYOUT) is None
    judged = {f.name for f in dataclasses.fields(KVLayout)} - {"block_size", "tp_size"}
    others = {"num_layers": 3, "num_kv_heads": 1, "head_dim": 2, "dtype": "float16", "kv_dtype": "fp8", "model": ""}
    assert set(others) == judged
    assert all(why_not(dataclasses.replace(LAYOUT, **{name: value}), LAYOUT) for name, value in others.items())


@pytest.mark.parametrize(("dtype", "kv_dtype"), STORED)
def test_a_layout_knows_what_a_piece_is(dtype, kv_dtype):
    layout = KVLayout(2, 3, 4, dtype, kv_dtype, 4, 1, "m")
    pool = full_pool(dtype, kv_dtype)
    piece = pool.read_tokens(0, [1], 0, 3)
    assert [(t.dtype, tuple(t.shape[1:])) for t in piece] == layout.piece
    assert layout.token_bytes * 4 * 13 == pool.nbytes


def ticket(**changes):
    said = {"request_id": "r", "attempt": 0, "epoch": "e", "token_hash": token_hash([1, 2]), "num_tokens": 2}
    return Ticket(**(said | {"layout": LAYOUT, "lease_s": 5.0} | changes))


def test_layouts_and_tickets_travel_as_json():
    assert KVLayout.from_dict(json.loads(json.dumps(LAYOUT.to_dict()))) == LAYOUT
    assert Ticket.from_dict(json.loads(json.dumps(ticket().to_dict()))) == ticket()


BAD_LAYOUT = [
    {"num_layers": 0}, {"num_layers": True}, {"num_layers": 2.0}, {"num_layers": 1 << 40}, {"head_dim": -1},
    {"dtype": "float64"}, {"dtype": None}, {"kv_dtype": "int4"}, {"kv_dtype": []}, {"model": None},
    {"block_size": "16"}, {"tp_size": 2}, {"more": 1},
]  # fmt: skip


@pytest.mark.parametrize("change", BAD_LAYOUT)
def test_a_layout_that_cannot_be_is_refused(change):
    with pytest.raises(MinillmError, match="layout|shared by"):
        KVLayout.from_dict(LAYOUT.to_dict() | change)


@pytest.mark.parametrize("said", [None, [], "layout", {}, {1: 2}])
def test_what_is_no_layout_or_ticket_at_all_is_refused(said):
    for kind in (KVLayout, Ticket):
        with pytest.raises(MinillmError, match=" has "):
            kind.from_dict(said)


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": ""}, {"request_id": 5}, {"request_id": "x" * 300}, {"attempt": -1}, {"attempt": True},
        {"attempt": 1 << 60}, {"num_tokens": 0}, {"num_tokens": 1.5}, {"epoch": None}, {"token_hash": ""},
        {"lease_s": 0}, {"lease_s": -1.0}, {"lease_s": float("inf")}, {"lease_s": float("nan")}, {"lease_s": 1e9},
        {"lease_s": "5"}, {"lease_s": True}, {"layout": None}, {"layout": {}}, {"more": 1},
    ],
)  # fmt: skip
def test_a_ticket_that_cannot_be_is_refused(change):
    with pytest.raises(MinillmError, match="ticket|layout"):
        Ticket.from_dict(ticket().to_dict() | change)


def test_a_hash_tells_tokens_apart():
    assert (
        token_hash([1, 2]) == token_hash((1, 2)) == "0c730b69905c5ef7a4ca5269f72365400bde2dd2c04eaf9bbb3d1c4a265a0131"
    )
    assert len({token_hash(ids) for ids in ([], [0], [0, 0], [1, 2], [2, 1], [258], [2, 1, 0])}) == 7
    for wrong in ([1.5], ["1"], [1 << 63], [None]):
        with pytest.raises(MinillmError, match="whole numbers"):
            token_hash(wrong)


def test_every_start_has_another_epoch():
    assert len({new_epoch() for _ in range(50)}) == 50
