"""Naive attention against flash: the same FLOPs, the matrix through memory four times."""

import pytest
import torch
from kernel_cases import DTYPES, close, traffic_of
from minillm.kernels.flash_prefill import attention_flops, flash_prefill, flash_prefill_bytes, flash_prefill_tiled
from minillm.kernels.naive_attention import naive_attention, naive_attention_bytes, naive_attention_tiled
from torch.utils.flop_counter import FlopCounterMode

from minillm.attention.causal import attend
from minillm.errors import MinillmError

N, T, H, K, D = 40, 57, 4, 2, 16  # 17 tokens of history before 40 new ones


def inputs(dtype=torch.float32, n=N):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(a, b, D, generator=g).to(dtype) for a, b in ((n, H), (T, K), (T, K))]


def alone(q, k, v):
    """One sequence without history, as flash prefill takes it."""
    n = len(q)
    pool = torch.empty(1, 16, K, D, dtype=q.dtype)
    return [q, k, v, pool, pool, torch.zeros(1, 1).int(), torch.tensor([0, n]).int(), torch.tensor([0]).int()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_m", [16, 64])
def test_equals_the_formula(dtype, block_m):
    q, k, v = inputs(dtype)
    oracle = attend(q.double(), k.double().transpose(0, 1), v.double().transpose(0, 1))
    assert close(naive_attention(q, k, v, block_m=block_m, block_n=16), oracle)
    assert close(naive_attention_tiled(q, k, v, block_m=block_m), oracle)


@pytest.mark.parametrize("block_m", [16, 64])
def test_traffic_is_the_analytic_one(block_m):
    traffic = traffic_of(lambda: naive_attention(*inputs(torch.float16), block_m=block_m, block_n=32))
    assert (traffic.loaded, traffic.stored) == naive_attention_bytes(N, T, H, K, D, 2, block_m)


def test_the_matrix_passes_four_times():
    loaded, stored = naive_attention_bytes(N, T, H, K, D, 2)
    assert loaded == 2 * (N * H * D + 2 * T * K * D + 2 * N * T * H)
    assert stored == 2 * (2 * N * T * H + N * H * D)


@pytest.mark.parametrize("block_m", [16, 64])
def test_flash_saves_traffic_not_flops(block_m):
    q, k, v = inputs(n=T)
    with FlopCounterMode(display=False) as naive:
        naive_attention_tiled(q, k, v, block_m=block_m)
    with FlopCounterMode(display=False) as flash:
        flash_prefill_tiled(*alone(q, k, v), block_m=block_m, block_n=32)
    assert naive.get_total_flops() == flash.get_total_flops() == attention_flops(T, T, H, D, block_m)

    config = {"BLOCK_M": block_m, "BLOCK_N": 32}
    counted = [
        traffic_of(lambda: naive_attention(q, k, v, block_m=block_m, block_n=32)).bytes,
        traffic_of(lambda: flash_prefill(*alone(q, k, v), T, config=config)).bytes,
    ]
    matrix = 4 * 4 * attention_flops(T, T, H, D, block_m) // (4 * D)  # four passes of fp32 elements
    lengths = 12 * H * -(-T // block_m)  # flash reads where its sequence begins, ends and came from
    assert counted[0] - counted[1] == matrix - lengths
    assert counted[1] == sum(flash_prefill_bytes([T], [0], T, H, D, 4, block_size=16, block_m=block_m, block_n=32))


def test_bad_input_is_refused_in_words():
    q, k, v = inputs()
    for given, words in (
        ((q, k[:30], v[:30]), "at least q's 40"),
        ((q[:, :3], k, v), "divisor"),
        ((q, k, v[1:]), "v must"),
    ):
        with pytest.raises(MinillmError, match=words):
            naive_attention(*given)
