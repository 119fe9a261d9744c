"""Flash prefill: against a float64 oracle and its twin, over poisoned pages, traffic counted, wrong on purpose."""

import math

import pytest
import torch
from flash_cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, TOLERANCE, Guarded, close, error, traffic_of
from minillm.kernels import flash_prefill as module
from minillm.kernels.flash_prefill import AHEAD, flash_prefill, flash_prefill_bytes
from minillm.kernels.flash_prefill_eager import LOG2_E
from minillm.kernels.inspect_code import inspect
from minillm.kernels.triton_private import compile_ahead, jit

from minillm.course.broken import broken, mutants
from minillm.errors import MinillmError

RAGGED = ([1, 0, 16, 17, 15, 33], [15, 16, 17, 0, 1, 40])  # new tokens, history: around a page of 16, and none
GROUPS = [(2, 2), (3, 1), (4, 1), (7, 1), (8, 1), (6, 2)]  # query heads, KV heads
INT8, FP8 = torch.int8, torch.float8_e4m3fn
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the same kernels, compiled: needs a GPU")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "K"), GROUPS)
def test_equals_the_float64_oracle_and_its_twin(dtype, H, K):
    case = Case(*RAGGED, H, K, 64, 16, dtype)
    assert close(case.launch(32, 32), case.oracle())
    assert close(case.twin(32, 32), case.oracle())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [16, 64, 256])
def test_head_dim_128_pages_and_the_tuned_tiles(dtype, page):
    case = Case([70, 3], [page + 1, page - 1], 2, 1, 128, page, dtype)
    assert close(case.launch(config=None), case.oracle())


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), min_size=1, max_size=3),
    st.sampled_from(GROUPS),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([(16, 16), (16, 32), (64, 32), (32, 64)]),
    st.sampled_from(DTYPES),
    st.sampled_from([None, INT8, FP8]),
    st.integers(0, 99),
)
def test_any_lengths_over_poisoned_pages(lengths, heads, page, tile, dtype, kv_dtype, seed):
    new, history = zip(*lengths)
    case = Case(new, history, *heads, 16, page, dtype, kv_dtype, seed=seed)
    assert close(case.launch(*tile), case.oracle())
    assert close(case.twin(*tile), case.oracle())


def test_writes_its_rows_and_nothing_else(monkeypatch):
    case, outputs = Case(*RAGGED, 3, 1, 32, 16, torch.float32), []

    def guarded(shape, dtype, device):
        outputs.append(Guarded(*shape, dtype=dtype))
        return outputs[-1].tensor

    with monkeypatch.context() as m:
        m.setattr(module.torch, "empty", guarded)
        got = case.launch()
    assert close(got, case.oracle())  # the buffer held NaN: every row was written
    outputs[0].check()


@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_values_keep_their_digits_in_a_quantised_history(dtype, kv_dtype):
    """Values of 1e-4 have scales near 1e-6. A probability times such a scale would be nothing in fp16."""
    case = Case([3, 9], [40, 31], 2, 1, 32, 16, dtype, kv_dtype, size=1e-4)
    assert close(case.launch(), case.oracle())
    assert close(case.twin(), case.oracle())


def test_another_scale_of_the_softmax():
    case = Case(*RAGGED, 2, 1, 32, 16, torch.float32)
    assert close(case.launch(softmax_scale=0.5), case.oracle(softmax_scale=0.5))
    assert not close(case.launch(), case.oracle(softmax_scale=0.5))


def test_large_scores_do_not_overflow():
    """exp(1000) is infinite in fp32: only differences from the running maximum may be exponentiated."""
    case = Case(*RAGGED, 2, 1, 32, 16, torch.float32)
    assert close(case.launch(softmax_scale=200.0), case.oracle(softmax_scale=200.0), torch.float16)


def test_the_twin_hands_out_the_state_after_each_tile():
    case, seen_states = Case([5, 37], [33, 20], 2, 1, 16, 16, torch.float32), []
    q, k, v, k_pool, v_pool, tables, cu, _ = case.tensors

    def watch(b, h, first, seen, m, l, acc):
        """Against the definition: the largest score, the sum of exponentials, their sum with v, over `seen` keys."""
        history, begin = case.history[b], int(cu[b])
        rows = torch.arange(first, first + len(m))
        position = torch.arange(history)
        where = tables[b, position // 16].long(), position % 16
        keys = torch.cat([k_pool[where][:, 0], k[begin : begin + case.new[b], 0]])[:seen].double()
        values = torch.cat([v_pool[where][:, 0], v[begin : begin + case.new[b], 0]])[:seen].double()
        scores = q[begin + rows, h].double() @ keys.T * LOG2_E / math.sqrt(16)
        scores[torch.arange(seen) > history + rows[:, None]] = -torch.inf
        assert close(m, scores.max(-1).values)
        weights = torch.exp2(scores - scores.max(-1, keepdim=True).values)
        assert close(l, weights.sum(-1))
        assert close(acc, weights @ values)
        seen_states.append((b, h, first, seen))

    case.twin(16, 32, watch=watch)
    assert seen_states[:3] == [(0, 0, 0, 32), (0, 0, 0, 33), (0, 0, 0, 38)]  # whole, the rest, the diagonal
    assert seen_states[-4:] == [(1, 1, 32, n) for n in (16, 20, 52, 57)]


@pytest.mark.parametrize("kv_dtype", [None, INT8])
@pytest.mark.parametrize(("page", "block_m", "block_n"), [(16, 32, 32), (64, 16, 32), (32, 32, 16)])
def test_traffic_is_the_analytic_one(kv_dtype, page, block_m, block_n):
    case = Case(*RAGGED, 4, 2, 32, page, torch.float16, kv_dtype)
    traffic = traffic_of(lambda: case.launch(block_m, block_n))
    wanted = flash_prefill_bytes(
        *RAGGED, 33, 4, 32, 2, block_size=page, block_m=block_m, block_n=block_n,
        kv_itemsize=1 if kv_dtype else 2, scaled=kv_dtype is not None,
    )  # fmt: skip
    assert (traffic.loaded, traffic.stored) == wanted
    tokens = sum(RAGGED[0]) * (4 + 2 * 2) * 32 * 2  # what no cache can save: each new q, k, v once, each old k, v once
    seen = sum(h for n, h in zip(*RAGGED) if n)  # nobody asks for the history of a sequence without new tokens
    history = seen * 2 * 2 * (32 * (1 if kv_dtype else 2) + (4 if kv_dtype else 0))
    assert 0 < traffic.unique_loaded - tokens - history < 4 * (seen + 13)  # and lengths and tables


def test_offsets_have_64_bits():
    """Blocks, slots and tokens that start past 2^31 elements. Only pages that are touched take memory."""
    page, d, far = 16, 16, 2**30 + 16
    buffer = torch.empty(4 * far, dtype=torch.float16)
    pool = buffer.as_strided((3, page, 1, d), (far, d, d, 1))
    pool[2] = torch.randn(page, 1, d)
    x = buffer.as_strided((3, 1, d), (far, d, 1), 4096)
    x.copy_(torch.randn(3, 1, d))
    rest = [torch.tensor([[2]]).int(), torch.tensor([0, 3]).int(), torch.tensor([16]).int()]
    oracle = module.flash_prefill_reference(x.double(), x, x, pool, pool, *rest)
    assert close(flash_prefill(x, x, x, pool, pool, *rest, 3), oracle)


def worst_error():
    """The largest error over dtypes, pools and tiles, against the tolerance: what a mutant must move."""
    worst = 0.0
    for dtype, kv_dtype in ((torch.float32, None), (torch.float16, None), (torch.float32, INT8)):
        case = Case([1, 20], [15, 33], 4, 2, 16, 16, dtype, kv_dtype)
        worst = max(worst, error(case.launch(32, 16), case.oracle()) / TOLERANCE[dtype])
    return worst


COMPILED = ("flash_prefill/int32_offset", "flash_prefill/tf32")  # right in the interpreter: the compiler's output tells


@pytest.mark.parametrize("name", [n for n in mutants("flash_prefill") if n not in COMPILED])
def test_a_wrong_kernel_is_noticed(name):
    with broken(name):
        assert worst_error() > 1


def test_the_right_kernel_is_not():
    """Nor is what a mutant leaves behind: the right kernel is back."""
    with broken("flash_prefill/missing_rescale"):
        pass
    assert worst_error() <= 1


def compiled(dtype: str):
    """What the compiler makes of a small variant, as `minillm kernels check` reads it."""
    case = next(a for a in AHEAD if "D=64" in a.name)
    types = case.signature | dict.fromkeys(("Q", "K", "V", "K_POOL", "V_POOL", "OUT"), f"*{dtype}")
    constants = case.constants | {"D": 16, "BLOCK_M": 16, "BLOCK_N": 16, "PAGE": 16}
    kernel = jit(module._flash_prefill.fn)  # anew: a compiled one remembers the functions that it calls
    made = compile_ahead(kernel, types, constants, "sm_90", num_warps=1, num_stages=1)
    return inspect(made, "sm_90", case.arguments, case.followed), made.asm["ptx"]


def test_an_offset_of_32_bits_is_seen_in_the_compiled_code():
    assert not compiled("fp16")[0].narrow
    with broken("flash_prefill/int32_offset"):
        assert compiled("fp16")[0].narrow


def test_tf32_is_seen_in_the_compiled_code():
    """TF32 keeps 10 bits of an fp32 operand. The interpreter multiplies in full, so no number here would show it."""
    code, ptx = compiled("fp32")
    assert not code.tf32
    assert "tf32" not in ptx
    with broken("flash_prefill/tf32"):
        code, ptx = compiled("fp32")
        assert code.tf32
        assert "tf32" in ptx


def test_nothing_to_do_is_no_launch():
    empty = Case([0, 0], [5, 0], 2, 1, 16, 16, torch.float32)
    assert empty.launch().shape == (0, 2, 16)
    assert traffic_of(empty.launch).bytes == 0


def test_bad_input_is_refused_in_words():
    case = Case([3, 2], [5, 0], 4, 2, 16, 16, torch.float32)
    names = ["q", "k", "v", "k_pool", "v_pool", "block_tables", "cu_seqlens", "history_lens"]

    def call(max_new=3, **changed):
        given = dict(zip(names, case.tensors)) | changed
        return flash_prefill(**given, max_new=max_new)

    q, k, v, k_pool, *_ = case.tensors
    for changed, words in (
        ({"q": q[0]}, "q must be [tokens, heads, head_dim]"),
        ({"k": k[:4]}, "k must be [5, kv_heads, 16], got [4, 2, 16]"),
        ({"v": v.half()}, "v must be float32, got float16"),
        ({"q": q[:, :3]}, "a multiple of KV heads, got 3 and 2"),
        ({"q": q[..., :8], "k": k[..., :8]}, "v must be [5, 2, 8]"),
        ({n: x[..., :8] for n, x in zip("qkv", (q, k, v))}, "head_dim must be one of 16, 32, 64, 128, got 8"),
        ({"k_pool": k_pool.half()}, "k_pool must be float32, got float16"),
        ({"k_pool": k_pool[:, :10]}, "v_pool must be [5, 10, 2, 16]" if len(k_pool) == 5 else "v_pool must be [4, 10"),
        (dict.fromkeys(("k_pool", "v_pool"), case.pools[:, 0, :10]), "block_size must be one of 16, 32, 64, 128, 256"),
        ({"block_tables": case.tables.long()}, "block_tables must be int32, got int64"),
        ({"cu_seqlens": case.cu[:2]}, "cu_seqlens must be [3], got [2]"),
        ({"history_lens": case.lens[:1]}, "history_lens must be [2], got [1]"),
        ({"max_new": 2}, "max_new is 2, but a sequence has 3 new tokens"),
        ({"max_new": -1}, "max_new must be a whole number of at least 0"),
        ({"k_scale": case.scales[0]}, "belong together"),
        ({"k_scale": case.scales[0], "v_scale": case.scales[1]}, "k_pool must be int8, float8_e4m3fn, got float32"),
        ({"softmax_scale": 0.0}, "softmax_scale must be above 0"),
        ({"q": q.transpose(1, 2).contiguous().transpose(1, 2)}, "call .contiguous() first"),
        ({n: x.bfloat16() for n, x in zip(names, case.tensors[:5])}, "wrongly in bf16"),
    ):
        with pytest.raises(MinillmError) as caught:
            call(**changed)
        assert words in str(caught.value)


@on_a_gpu
@pytest.mark.parametrize("kv_dtype", [None, INT8, FP8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("d", [64, 128])
def test_compiled_on_a_gpu(d, page, dtype, kv_dtype):
    """bf16 has 8 bits of mantissa: an output, and each probability, is off by up to 2^-9."""
    case = Case([1, 0, 300, 129], [257, 16, 0, 511], 7, 1, d, page, dtype, kv_dtype, device="cuda")
    tolerance = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 5e-6}[dtype]
    assert error(case.launch(config=None), case.oracle()) < tolerance
