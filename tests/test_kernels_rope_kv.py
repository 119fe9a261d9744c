"""RoPE and the KV write: against an oracle and a twin, in pools whose other slots are NaN, and wrong on purpose."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, Guarded, close, guarded_outputs, traffic_of
from minillm.kernels import rope_kv as module
from minillm.kernels.kv_quant import LARGEST, dequantize_kv, quantize_kv
from minillm.kernels.rope_kv import rope_kv_bytes, rope_kv_reference, rope_kv_tiled, rope_kv_write
from minillm.kernels.triton_private import compile_ahead

from minillm.config import ModelConfig
from minillm.course.broken import broken, mutants
from minillm.errors import MinillmError
from minillm.models.transformer import apply_rope, rope_table

QUANTISED = tuple(LARGEST)
GROUPS = [1, 3, 4, 7, 8]  # query heads a KV head


def table(length, d, dtype):
    return rope_table(ModelConfig(head_dim=d, rope_theta=100.0), length, dtype)


class Case:
    """New tokens and pools in which every slot is NaN (or a sentinel), inside guards."""

    def __init__(self, positions, slots, kv_heads=2, group=2, d=8, block_size=4, blocks=5, dtype=torch.float32,
                 pool=None, gap=0, seed=0):  # fmt: skip
        torch.manual_seed(seed)
        self.heads, self.dtype, self.pool_dtype = kv_heads * group, dtype, pool or dtype
        self.qkv = Guarded(len(positions), self.heads + 2 * kv_heads, d, dtype=dtype, gap=gap)
        self.qkv.fill(torch.randn(self.qkv.tensor.shape) * torch.rand(len(positions), 1, 1).mul(4).exp())
        self.cos, self.sin = table(64, d, dtype)
        self.positions, self.slots = torch.tensor(positions).long(), torch.tensor(slots).long()
        self.shape = (blocks, block_size, kv_heads, d)
        self.gap = gap
        self.k_pool, self.v_pool = (self._pool(self.shape, self.pool_dtype) for _ in range(2))
        scales = pool in QUANTISED
        self.k_scale, self.v_scale = (
            Guarded(*self.shape[:3], gap=1) if scales else None for _ in range(2)
        )  # fmt: skip

    def _pool(self, shape, dtype):
        if dtype == torch.float8_e4m3fn:
            guarded = Guarded(*shape, dtype=torch.uint8, gap=self.gap)  # 77 is 3.25 in e4m3: finite, so moves are seen
            guarded.view = guarded.tensor.view(dtype)
            return guarded
        guarded = Guarded(*shape, dtype=dtype, gap=self.gap)
        guarded.view = guarded.tensor
        return guarded

    def run(self, function=rope_kv_write):
        scales = [s.tensor if s else None for s in (self.k_scale, self.v_scale)]
        return function(
            self.qkv.tensor, self.cos, self.sin, self.positions, self.slots, self.k_pool.view, self.v_pool.view,
            self.heads, *scales,
        )  # fmt: skip

    def oracle(self):
        """q, k and float64 pools, NaN where nothing was written."""
        pools = [torch.full(self.shape, math.nan, dtype=torch.float64) for _ in range(2)]
        q, k = rope_kv_reference(
            self.qkv.tensor.double(),
            self.cos.double(),
            self.sin.double(),
            self.positions,
            self.slots,
            *pools,
            self.heads,
        )
        return q, k, *pools

    def wrong(self, function=rope_kv_write):
        """In words, everything that is wrong after a run; empty if nothing is."""
        with guarded_outputs() as outputs:
            q, k = self.run(function)
        want_q, want_k, *want_pools = self.oracle()
        found = [name for name, got, want in (("q", q, want_q), ("k", k, want_k)) if not close(got, want)]
        written = torch.zeros(self.shape[:2], dtype=torch.bool)
        real = self.slots[self.slots >= 0]
        written[real // self.shape[1], real % self.shape[1]] = True
        v = self.qkv.tensor[:, -self.shape[2] :]
        for name, pool, scale, want, source in (
            ("k", self.k_pool, self.k_scale, want_pools[0], k), ("v", self.v_pool, self.v_scale, want_pools[1], v),
        ):  # fmt: skip
            found += [f"{name}: around the pool"] if outside(pool) else []
            others = pool.tensor[~written]
            kept = others.isnan() if math.isnan(pool.sentinel) else others == pool.sentinel
            found += [] if bool(kept.all()) else [f"{name}: a slot that no token owns"]
            if scale is None:
                found += [] if close(pool.view[written], want[written], self.dtype) else [f"{name}: values"]
                continue
            found += [f"{name}: around the scales"] if outside(scale) else []
            found += [] if bool(scale.tensor[~written].isnan().all()) else [f"{name}: a scale that no token owns"]
            stored, steps = quantize_kv(source[self.slots >= 0], self.pool_dtype)
            at = (real // self.shape[1], real % self.shape[1])
            if not torch.allclose(scale.tensor[at], steps, rtol=1e-6, atol=0):
                found.append(f"{name}: scale")
            if not torch.equal(pool.view[at].view(torch.uint8), stored.view(torch.uint8)):
                found.append(f"{name}: stored")
            error = (dequantize_kv(pool.view[at], scale.tensor[at]).double() - want[at]).abs().amax(-1)
            bound = want[at].abs().amax(-1) * (0.52 / 127 if self.pool_dtype == torch.int8 else 0.52 / 8)
            found += [] if bool((error <= bound + 1e-9).all()) else [f"{name}: error of quantisation"]
        found += ["around the outputs"] if any(outside(guarded) for guarded in outputs) else []
        found += ["around qkv"] if outside(self.qkv) else []
        return found


def outside(guarded):
    try:
        guarded.check()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("function", [rope_kv_write, rope_kv_tiled])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "d"), [(1, 64), (3, 64), (4, 128), (7, 64), (8, 128), (2, 2), (3, 6), (2, 80)])
def test_equals_the_float64_oracle(function, dtype, group, d):
    for gap, block_size in ((0, 16), (5, 4)):
        case = Case(
            [3, 0, 63], [2 * block_size + 3, -1, 0], group=group, d=d, dtype=dtype, gap=gap, block_size=block_size
        )
        assert case.wrong(function) == []


@pytest.mark.parametrize("function", [rope_kv_write, rope_kv_tiled])
@pytest.mark.parametrize("pool", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_pools(function, pool, dtype):
    """Scale and stored number are those of `quantize_kv`; the error is at most half a step."""
    for group, d in ((1, 64), (3, 6)):
        case = Case([3, 0, 63, 9], [11, -1, 0, 19], group=group, d=d, dtype=dtype, pool=pool, gap=3)
        case.qkv.tensor[3] = 0.0  # a token of zeros
        assert case.wrong(function) == []
        at = 19 // 4, 19 % 4
        for stored, scale in ((case.k_pool.view, case.k_scale.tensor), (case.v_pool.view, case.v_scale.tensor)):
            assert bool((stored[at].float() == 0).all())
            assert bool((scale[at] > 0).all())
            assert bool(scale[at].isfinite().all())


def test_the_rotation_is_the_model_s():
    case = Case([5, 1, 40], [0, 1, 2], d=64)
    q, k = case.run()
    cos, sin = (t[case.positions].unsqueeze(1) for t in (case.cos, case.sin))
    assert close(torch.cat((q, k), dim=1), apply_rope(case.qkv.tensor[:, : case.heads + 2].double(), cos, sin))


@settings(max_examples=25)
@given(st.data())
def test_any_step_writes_only_the_slots_it_owns(data):
    """Ragged lengths, a shuffled block table, padding in any place."""
    block_size, blocks = data.draw(st.sampled_from([1, 2, 4, 16])), 6
    free = data.draw(st.permutations(range(block_size * blocks)))
    count = data.draw(st.integers(0, min(6, len(free))))
    slots = [data.draw(st.sampled_from([-1, free[i]])) for i in range(count)]
    positions = data.draw(st.lists(st.integers(0, 63), min_size=count, max_size=count))
    case = Case(
        positions, slots, kv_heads=data.draw(st.integers(1, 3)), group=data.draw(st.sampled_from(GROUPS)),
        d=2 * data.draw(st.integers(1, 9)), block_size=block_size, blocks=blocks,
        dtype=data.draw(st.sampled_from(DTYPES)), pool=data.draw(st.sampled_from([None, *QUANTISED])),
        gap=data.draw(st.integers(0, 3)), seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    assert case.wrong() == []


def test_pools_with_any_strides():
    """Keys and values as two halves of one allocation, heads before slots."""
    case = Case([3, 9], [5, 14])
    both = torch.full((5, 2, 2, 4, 8), math.nan)
    k_pool, v_pool = (both[:, i].transpose(1, 2) for i in range(2))
    args = (case.qkv.tensor, case.cos, case.sin, case.positions, case.slots)
    _, k = rope_kv_write(*args, k_pool, v_pool, case.heads)
    assert torch.equal(torch.stack([both[1, 0, :, 1], both[3, 0, :, 2]]), k)
    assert torch.equal(torch.stack([both[1, 1, :, 1], both[3, 1, :, 2]]), case.qkv.tensor[:, -2:])
    assert int(both.isfinite().sum()) == 2 * 2 * 2 * 8


@pytest.mark.parametrize("pool", [None, *QUANTISED])
@pytest.mark.parametrize(("group", "d"), [(4, 64), (3, 6)])
def test_traffic_is_the_analytic_one(pool, group, d):
    case = Case([3, 0, 63], [11, -1, 0], group=group, d=d, dtype=torch.float16, pool=pool)
    traffic = traffic_of(case.run)
    pool_itemsize = 2 if pool is None else 1
    want = rope_kv_bytes(3, 2, case.heads, 2, d, 2, 2, pool_itemsize, pool is not None)
    assert (traffic.loaded, traffic.stored) == want
    assert traffic.unique_stored == traffic.stored
    programs = -(-(case.heads + 4) // 8)  # a cache answers what a token's later programs ask again
    assert traffic.loaded - traffic.unique_loaded == 3 * (programs - 1) * (d * 2 + 16)


def reports(pool):
    case = Case([3, 0, 63, 9], [11, -1, 0, 19], group=3, d=6, pool=pool, gap=3)
    case.qkv.tensor[3] = 0.0
    return case.wrong()


OF_QUANTISED = ("scale_dropped", "scale_of_another_head", "scale_of_one_half", "zero_divided", "cut_off")


@pytest.mark.parametrize("name", [n for n in mutants("rope_kv") if n != "rope_kv/int32_offset"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # zero_divided, in numpy
def test_a_wrong_kernel_is_noticed(name):
    pool = torch.int8 if name.endswith(OF_QUANTISED) else None
    assert reports(pool) == []
    with broken(name):
        assert reports(pool) != []
    assert reports(pool) == []


@pytest.mark.parametrize("name", ["scale_dropped", "scale_of_another_head", "scale_of_one_half", "zero_divided"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_wrong_fp8_kernel_is_noticed(name):
    with broken(f"rope_kv/{name}"):
        assert reports(torch.float8_e4m3fn) != []


def test_offsets_have_64_bits():
    """The last page starts past 2^31 elements. Only pages that are touched take memory."""
    case = Case([3, 1], [2 * 4 + 1, 3], d=8)
    stride = 2**30 + 64
    pools = [
        torch.empty(2 * stride + 4 * 2 * 8).as_strided((3, 4, 2, 8), (stride, 16, 8, 1)) for _ in range(2)
    ]  # fmt: skip
    _, k = rope_kv_write(case.qkv.tensor, case.cos, case.sin, case.positions, case.slots, *pools, case.heads)
    assert torch.equal(pools[0][2, 1], k[0])
    assert torch.equal(pools[0][0, 3], k[1])
    assert torch.equal(pools[1][2, 1], case.qkv.tensor[0, -2:])


def test_an_offset_of_32_bits_is_seen_in_the_compiled_code():
    """The slip shows in the compiler's output: the block times its stride is multiplied in 32 bits."""

    def wide() -> bool:
        ahead = module.AHEAD[0]
        ir = compile_ahead(module._rope_kv, ahead.signature, ahead.constants, "sm_90", num_warps=1).asm["ttir"]
        products = [line for line in ir.splitlines() if "arith.muli" in line]
        narrow = [
            line for line in products if "i64" not in line and "%num_heads" not in line and "%kv_heads" not in line
        ]
        return bool(products) and not narrow

    assert wide()
    with broken("rope_kv/int32_offset"):
        assert not wide()


def test_bad_input_is_refused_in_words():
    case = Case([3, 0], [0, 1])
    names = ("qkv", "cos", "sin", "positions", "slots", "k_pool", "v_pool", "num_heads", "k_scale", "v_scale")
    right = dict(
        zip(names, (case.qkv.tensor, case.cos, case.sin, case.positions, case.slots, case.k_pool.view,
                    case.v_pool.view, case.heads, None, None))
    )  # fmt: skip
    int8 = torch.zeros(case.shape, dtype=torch.int8)
    scales = torch.zeros(case.shape[:3])
    for changes, words in (
        ({"qkv": torch.randn(2, 64)}, "qkv must be [tokens, heads, head_dim]"),
        ({"num_heads": 3}, "qkv must hold 3 query heads"),
        ({"num_heads": 7}, "num_heads must be a whole number from 1 to 6, got 7"),
        ({"qkv": torch.randn(2, 8, 7)}, "7 wide"),
        ({"positions": torch.tensor([0])}, "positions must be [2], got [1]"),
        ({"positions": torch.tensor([0, 64])}, "positions must be 0 to 63, got 0 to 64"),
        ({"slots": torch.tensor([0, 20])}, "slots must be -1 to 19, got 0 to 20"),
        ({"slots": torch.tensor([0, -2])}, "slots must be -1 to 19, got -2 to 0"),
        ({"slots": torch.tensor([0, 1], dtype=torch.int32)}, "slots must be int64, got int32"),
        ({"cos": case.cos[:, :4]}, "cos must be [positions, 8], got [64, 4]"),
        ({"sin": case.sin[:9]}, "sin must be [64, 8], got [9, 8]"),
        ({"v_pool": torch.zeros(4, 4, 2, 8)}, "v_pool must be [5, 4, 2, 8], got [4, 4, 2, 8]"),
        ({"k_pool": torch.zeros(5, 3, 2, 8), "v_pool": torch.zeros(5, 3, 2, 8)}, "power of two, got 3"),
        ({"v_pool": torch.zeros(5, 2, 4, 8).transpose(1, 2)}, "same strides"),
        ({"k_pool": int8, "v_pool": int8}, "need both k_scale and v_scale"),
        ({"k_scale": scales, "v_scale": scales}, "other pools neither"),
        ({"k_pool": int8, "v_pool": int8, "k_scale": scales, "v_scale": scales.half()}, "v_scale must be float32"),
        ({n: right[n].bfloat16() for n in ("qkv", "cos", "sin", "k_pool", "v_pool")}, "wrongly in bf16"),
    ):  # fmt: skip
        with pytest.raises(MinillmError) as caught:
            rope_kv_write(**(right | changes))
        assert words in str(caught.value)
    with pytest.raises(MinillmError, match="int8 or float8_e4m3fn, got float16"):
        quantize_kv(torch.zeros(2, 8), torch.float16)


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(-24, 24), st.sampled_from(QUANTISED), st.integers(0, 99))
def test_quantising_keeps_half_a_step_at_any_size(d, exponent, dtype, seed):
    x = torch.randn(3, d, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    stored, scale = quantize_kv(x, dtype)
    error = (dequantize_kv(stored, scale, torch.float64) - x.double()).abs()
    amax = x.abs().amax(-1, keepdim=True).double()
    if dtype == torch.int8:
        assert bool((error <= amax * 0.5001 / 127).all())
    else:  # half of a step is 1/16 of a value, and never less than half of the smallest step, 2^-10 of 448
        assert bool((error <= torch.maximum(x.double().abs() / 16, amax * 2**-10 / 448) * 1.0001).all())
