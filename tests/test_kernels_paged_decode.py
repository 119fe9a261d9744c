"""Paged decode: against a float64 oracle and its twin, in pools full of NaN, traffic counted, and wrong on purpose."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, close, error, traffic_of
from minillm.kernels import paged_decode as module
from minillm.kernels.merge_splits import merge_splits_reference
from minillm.kernels.paged_decode import paged_decode, paged_decode_bytes, paged_decode_reference
from minillm.kernels.splits import split_count
from minillm.kernels.triton_private import compile_ahead, watch_memory
from paged_cases import TILE, TOLERANCE, Case

from minillm.course.broken import broken, mutants
from minillm.errors import MinillmError


@pytest.mark.parametrize(("dtype", "d"), [(torch.float32, 64), (torch.float16, 128)])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_equals_the_float64_oracle_and_its_twin(dtype, d, group):
    case = Case([0, 1, 15, 16, 17, 150], group=group, d=d, dtype=dtype)
    for splits in (1, 3):
        assert case.right(case.kernel(splits))
        assert case.right(case.tiled(splits))


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
def test_every_page_size_around_its_edges(page):
    case = Case([page - 1, page, page + 1, 1, 2 * page + 3], K=1, page=page)
    for splits in (1, 2):
        assert case.right(case.kernel(splits))


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=3), st.sampled_from([1, 3, 4, 7, 8]), st.integers(1, 2),
    st.sampled_from([64, 128]), st.sampled_from([16, 32, 128]), st.integers(1, 6), st.sampled_from(DTYPES),
    st.integers(0, 999),
)  # fmt: skip
def test_any_lengths_tables_and_splits(lens, group, K, d, page, splits, dtype, seed):
    case = Case(lens, group, K, d, page, dtype, seed=seed)
    assert case.right(case.kernel(splits))


@pytest.mark.parametrize("kv", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_pools(kv, dtype):
    case = Case([0, 1, 17, 130], group=4, dtype=dtype, kv=kv)
    for splits in (1, 2):
        assert case.right(case.kernel(splits))
        assert case.right(case.tiled(splits))


@pytest.mark.parametrize("kv", [torch.int8, torch.float8_e4m3fn])
def test_small_values_of_quantised_pools_keep_their_digits_in_fp16(kv):
    """A probability times a small scale is below what fp16 can hold; the weight that a tile adds up is not."""
    case = Case([0, 130, 70], group=4, dtype=torch.float16, kv=kv, sharp=4.0)
    case.v_scale *= 1e-3
    for splits in (1, 2):
        assert case.right(case.kernel(splits))
        assert case.right(case.tiled(splits))


def test_sharp_scores_do_not_overflow():
    case = Case([130, 70], sharp=60.0)
    assert float(case.oracle()[1].max()) > 89  # exp of it is not a float32
    for splits in (1, 2):
        assert case.right(case.kernel(splits))


def test_the_twin_hands_out_its_running_state():
    """After each tile, acc / weight is the attention over what was seen so far: the kernel's invariant."""
    case, seen = Case([150], group=3, K=1), []
    case.tiled(watch=seen.append)
    assert [(s.first, s.end) for s in seen] == [(0, 64), (64, 128), (128, 150)]
    for s in seen:
        part = paged_decode_reference(case.q, case.k_pool, case.v_pool, case.tables, torch.tensor([s.end]))
        assert close(s.acc / s.weight[:, None], part[0][0])
        assert close((s.top + s.weight.log2()) * math.log(2), part[1][0])
    assert len({float(s.top[0]) for s in seen}) > 1  # the maximum moved, so a rescale was needed


def test_splits_are_parts_of_the_sequence():
    """The oracle's own merge of the oracle over two halves is the oracle over the whole."""
    case = Case([128], K=1, page=16)
    halves = [
        paged_decode_reference(case.q, case.k_pool, case.v_pool, t, torch.tensor([64]))
        for t in (case.tables[:, :4], case.tables[:, 4:])
    ]
    out, lse = merge_splits_reference(*(torch.stack(x, 2) for x in zip(*halves)))
    assert torch.allclose(out, case.oracle()[0], rtol=1e-12)
    assert torch.allclose(lse, case.oracle()[1], rtol=1e-12)


def test_offsets_have_64_bits():
    """Block 4 starts past 2^31 elements. Only the pages that are read are ever touched, so this needs no memory."""
    block_stride, page, d = 2**29 + 64, 16, 64
    pools = [torch.empty(4 * block_stride + page * d, dtype=torch.float16) for _ in range(2)]
    k, v = (x.as_strided((5, page, 1, d), (block_stride, d, d, 1)) for x in pools)
    for i in (4, 2):
        k[i], v[i] = torch.randn(2, page, 1, d)
    q, tables, lens = torch.randn(1, 4, d).half(), torch.tensor([[4, 2]], dtype=torch.int32), torch.tensor([21]).int()
    oracle = paged_decode_reference(q, k, v, tables, lens)
    got = paged_decode(q, k, v, tables, lens, 32, num_splits=1)
    assert close(got[0], oracle[0])
    assert error(got[1], oracle[1]) < TOLERANCE[torch.float32]


# Traffic ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", [None, torch.int8])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("lens", [[0, 1, 16, 130], [200]])
def test_traffic_is_the_analytic_one(lens, splits, kv):
    case = Case(lens, group=4, dtype=torch.float16, kv=kv)
    traffic = traffic_of(lambda: case.kernel(splits))
    assert (traffic.loaded, traffic.stored) == paged_decode_bytes(lens, num_splits=splits, tile=TILE, **case.shape)
    assert traffic.unique_stored == traffic.stored  # each output once; with right outputs: nothing beside them


def test_nothing_of_the_pools_is_read_but_what_is_owned():
    """Addresses, not only their number: each owned key and value once, and no other element."""
    case, owned = Case([17, 130], group=4), []
    for pool in (case.k_pool, case.v_pool):
        for block, slot in torch.nonzero(case.owned).tolist():
            starts = [pool[block, slot, kv].data_ptr() for kv in range(pool.shape[2])]
            owned += [start + 4 * i for start in starts for i in range(pool.shape[3])]
    storage = case.k_pool.untyped_storage()  # of both pools
    low, high = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    read = []
    with watch_memory(lambda at, mask, size: read.extend(at[mask.astype(bool)].tolist()), lambda *_: None):
        case.kernel()
    assert sorted(a for a in read if low <= a < high) == sorted(owned)


def test_keys_and_values_are_read_once_for_a_group_of_heads():
    """A program for each query head, as if each had KV of its own, reads them group times: same result, more bytes."""
    case, group, T = Case([130, 60], group=8, K=1, dtype=torch.float16), 8, 190
    packed = traffic_of(case.kernel)
    per_head = {name: getattr(case, name).expand(-1, -1, group, -1) for name in ("k_pool", "v_pool")}
    naive = traffic_of(lambda: case.kernel(**per_head))
    assert close(case.kernel(**per_head)[0], case.kernel()[0])
    kv_bytes = 2 * T * 1 * 64 * 2
    assert packed.loaded - kv_bytes < 0.1 * kv_bytes
    assert naive.loaded - group * kv_bytes < 0.1 * group * kv_bytes
    few = Case([130, 60], group=2, K=1, dtype=torch.float16)
    assert packed.loaded - traffic_of(few.kernel).loaded == 2 * 6 * 64 * 2  # six query heads more: only their q


def test_the_launcher_splits_by_shapes_alone(monkeypatch):
    """context_lens must not be read on the host: a captured graph is replayed with others."""
    case, used = Case([5, 7], K=1), []
    monkeypatch.setattr(module, "multiprocessors", lambda device: 10)
    monkeypatch.setattr(module, "merge_splits", lambda out, lse, dtype: used.append(out.shape[2]))
    tables = torch.zeros(2, 64, dtype=torch.int32)
    tables[:, : case.tables.shape[1]] = case.tables
    case.kernel(None, block_tables=tables, max_context=1024)
    assert used == [split_count(2, 1024, 10)]
    assert used[0] > 1


# Wrong on purpose -------------------------------------------------------------------------------------

COMPILED = ("paged_decode/tf32", "paged_decode/int32_offset")  # seen in compiled code; tests of their own


@functools.cache
def mutant_cases():
    small = Case([70], K=1, dtype=torch.float16, kv=torch.int8, sharp=4.0)
    small.v_scale *= 1e-3
    return [
        (Case([0, 1, 17, 150], group=3), (1, 3)),
        (Case([130], group=4, K=2, dtype=torch.float16), (1, 2)),
        (Case([40], K=1, kv=torch.int8), (1,)),
        (small, (1,)),
    ]


def worst_error():
    """Relative to the tolerance; stops at the first case that fails."""
    worst = 0.0
    for case, splits in mutant_cases():
        for s in splits:
            worst = max(worst, case.error(case.kernel(s)) / TOLERANCE[case.q.dtype])
            if worst > 1:
                return worst
    return worst


def test_the_right_kernel_passes_where_wrong_ones_fail():
    assert worst_error() <= 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [n for n in mutants("paged_decode") if n not in COMPILED])
def test_a_wrong_kernel_is_noticed(name):
    with broken(name):
        assert worst_error() > 1


def test_one_token_too_few_exceeds_the_tolerance_by_itself():
    """Without the help of a NaN: a context of many tokens, all but the newest seen."""
    for dtype in DTYPES:
        case = Case([150], K=1, dtype=dtype)
        with broken("paged_decode/mask_off_by_one"):
            assert TOLERANCE[dtype] < case.error(case.kernel()) < math.inf


def compiled(dtype="bf16", target="sm_90"):
    """The first variant that an engine launches there, or the same in fp32."""
    case = next(a for a in module.AHEAD if target in a.targets)
    types = dict(case.signature) | dict.fromkeys(("Q", "KP", "VP", "OUT"), f"*{dtype}")
    warps, stages = (case.num_warps, case.num_stages) if dtype == "bf16" else (4, 3)
    return compile_ahead(module._paged_decode, types, case.constants, target, num_warps=warps, num_stages=stages).asm


def test_fp32_is_not_multiplied_as_tf32():
    assert ".tf32" not in compiled("fp32")["ptx"]
    with broken("paged_decode/tf32"):
        assert ".tf32" in compiled("fp32")["ptx"]


def test_page_offsets_have_64_bits_in_the_compiled_code():
    """The block ids that a tile gathers are widened before they are multiplied by a stride."""

    def widened() -> bool:
        ir = compiled()["ttir"]
        return any("arith.extsi %block" in line and "tensor<64xi64>" in line for line in ir.splitlines())

    assert widened()
    with broken("paged_decode/int32_offset"):
        assert not widened()


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_loads_are_asynchronous_and_products_are_matrix_instructions(target):
    ptx = compiled(target=target)["ptx"]
    assert "mma.sync" in ptx
    assert "cp.async.cg.shared.global" in ptx  # 16 bytes at a time; a page id is 4 bytes and goes by cp.async.ca
    assert "ld.local" not in ptx
    assert "st.local" not in ptx


def test_bad_input_is_refused_in_words():
    case = Case([5, 17], group=3, K=2)
    half = case.k_pool.half()
    int8 = Case([5, 17], group=3, K=2, kv=torch.int8)
    odd = torch.zeros(*int8.v_pool.shape[:3], 65, dtype=torch.int8)[..., :64]
    for call, words in (
        (lambda: case.kernel(q=case.q[0]), "[sequences, heads, head_dim]"),
        (lambda: case.kernel(q=case.q[:, :5]), "multiple of KV heads"),
        (lambda: case.kernel(k_pool=half), "k_pool must be float32, got float16"),
        (lambda: case.kernel(v_pool=case.v_pool[:1]), "v_pool must be"),
        (lambda: case.kernel(block_tables=case.tables.long()), "block_tables must be int32, got int64"),
        (lambda: case.kernel(block_tables=case.tables[:1]), "block_tables must be [2, max_blocks]"),
        (lambda: case.kernel(context_lens=case.lens.long()), "context_lens must be int32"),
        (lambda: case.kernel(max_context=10**6), "max_context must be a whole number from 0 to"),
        (lambda: case.kernel(num_splits=0), "num_splits must be a whole number from 1"),
        (lambda: case.kernel(k_pool=case.k_pool[:, :12], v_pool=case.v_pool[:, :12]), "block_size must be a power"),
        (lambda: int8.kernel(k_scale=None, v_scale=None), "k_pool must be float32, got int8"),
        (lambda: int8.kernel(v_scale=None), "give both or neither"),
        (lambda: int8.kernel(k_scale=int8.k_scale[:1]), "k_scale must be"),
        (lambda: int8.kernel(v_pool=odd), "v_pool must have even strides"),
    ):
        with pytest.raises(MinillmError) as caught:
            call()
        assert words in str(caught.value)
