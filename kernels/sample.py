"""The next token, chosen where the logits are: greedy and Gumbel-max in Triton. Lesson 04 builds it.

A row of logits is 512 KiB in fp32 at a vocabulary of 131,072, and a decode step has few rows: a program a row would
leave most of a GPU idle. So a row is cut into blocks of the vocabulary, a program each writes the best (score, token)
of its block, and a second, tiny launch takes the best of those. Both grids follow from shapes alone. The pairs are
also all that shards of a vocabulary would have to exchange.

The noise is `rng.py`'s hash of (seed, position, token id), the same bits. A winner among equals is the lowest id. NaN
is not a number to be passed over: a row that holds one gives -1, as does a row of -inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from minillm.kernels.ahead import Ahead
from minillm.kernels.checks import expect
from minillm.kernels.configs import pick
from minillm.kernels.triton_private import jit
from torch import Tensor

from minillm import rng
from minillm.errors import MinillmError
from minillm.logits import BIG, TINY, apply_temperature

NO_TOKEN = -1
_BIG, _TINY, _NO_TOKEN = tl.constexpr(BIG), tl.constexpr(TINY), tl.constexpr(NO_TOKEN)
NO_ID = tl.constexpr(2**31 - 1)  # larger than every token id


def greedy_reference(logits: Tensor) -> Tensor:
    """As `greedy`, in plain torch. `max` returns NaN for a row that holds one."""
    values, ids = logits.max(dim=-1)
    return torch.where(values > -torch.inf, ids, NO_TOKEN)


def gumbel_reference(logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
    """As `gumbel_sample`, in plain torch: argmax of (logit - max) / temperature + noise (Gumbel, 1954)."""
    return greedy_reference(scores_reference(logits, keys, temperature))


def scores_reference(logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
    """What `gumbel_sample` takes the best of, fp32 [B, V]."""
    scaled = apply_temperature(logits.float().clamp(max=BIG), temperature)
    noise = rng.gumbel(keys, torch.arange(logits.shape[-1], device=logits.device))
    return scaled + noise * (temperature > 0).unsqueeze(-1)


def best_tiled(scores: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Both stages, program by program, in eager torch: (values, ids) [B, blocks] of the blocks, tokens [B]."""
    rows, vocab = scores.shape
    blocks = -(-vocab // block)
    values, ids = torch.empty(rows, blocks), torch.empty(rows, blocks, dtype=torch.int64)
    tokens = torch.empty(rows, dtype=torch.int64)
    for row in range(rows):
        for i in range(blocks):
            part = scores[row, i * block : (i + 1) * block].float()
            values[row, i] = torch.nan if bool(part.isnan().any()) else part.max()
            ids[row, i] = i * block + int((part == values[row, i]).int().argmax())  # the first of the equals
        best = values[row].max()  # NaN if one is
        winners = ids[row][values[row] == best]
        tokens[row] = winners.min() if bool(best > -torch.inf) else NO_TOKEN
    return values, ids, tokens


def greedy_bytes(rows: int, vocab: int, itemsize: int, block: int) -> tuple[int, int]:
    """(loaded, stored) bytes: the logits once, and a pair of 4-byte numbers a block, written and read."""
    pairs = rows * -(-vocab // block) * 8
    return rows * vocab * itemsize + pairs, pairs + rows * 8


def gumbel_bytes(rows: int, vocab: int, itemsize: int, block: int) -> tuple[int, int]:
    """(loaded, stored) bytes: the logits twice, since the largest comes first; every program reads its row's maxima."""
    blocks = -(-vocab // block)
    pairs = rows * blocks * 8
    return rows * (2 * vocab * itemsize + blocks * (4 * blocks + 12)) + pairs, 2 * pairs + rows * 8


@jit
def mix32(x):
    """lowbias32 (Wellons, 2018) on uint32, as in rng.py: products wrap, shifts are logical."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@jit
def gumbel_noise(token, key_low, key_high):
    """Noise of rng.gumbel for token ids and the halves of a key, all uint32 -> fp32."""
    bits = mix32(mix32(token ^ key_low) ^ key_high)
    u = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    u = tl.minimum(u, 0.999999940395355)  # 1 - 2^-24
    # log(1 - u) without the digits that 1 - u loses near 0, where the noise is largest (Kahan's way)
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, 1.0, rest - 1.0)
    log = tl.where(rest == 1.0, -u, tl.log(rest) * (-u / lost))
    return -tl.log(-log)


@jit
def best_of(score, token, inside):
    """(score, lowest token id of the best); NaN where a score is NaN."""
    broken = tl.max(((score != score) & inside).to(tl.int32), axis=0) > 0
    score = tl.where(inside & (score == score), score, float("-inf"))
    best = tl.max(score, axis=0)
    first = tl.min(tl.where(inside & (score == best), token, NO_ID), axis=0)
    return tl.where(broken, float("nan"), best), first


@jit
def _best_of_block(LOGITS, VALUES, IDS, stride, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: row * stride passes 2^31 elements at 16,384 rows of 131,072
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    score = tl.load(LOGITS + row * stride + token, mask=inside, other=0.0).to(tl.float32)
    best, first = best_of(score, token, inside)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(VALUES + out, best)
    tl.store(IDS + out, first)


@jit
def _best_noisy_of_block(
    LOGITS, MAXIMA, KEYS, TEMPERATURE, VALUES, IDS, stride, V, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    blocks = tl.num_programs(1)
    i = tl.arange(0, BLOCKS)
    largest = tl.max(tl.load(MAXIMA + row * blocks + i, mask=i < blocks, other=float("-inf")), axis=0)
    largest = tl.where(largest > float("-inf"), tl.minimum(largest, _BIG), 0.0)  # -inf - -inf would be NaN
    temperature = tl.load(TEMPERATURE + row)
    key_low = tl.load(KEYS + row * 2).to(tl.uint32, bitcast=True)
    key_high = tl.load(KEYS + row * 2 + 1).to(tl.uint32, bitcast=True)
    score = tl.load(LOGITS + row * stride + token, mask=inside, other=0.0).to(tl.float32)
    score = tl.where(score > _BIG, _BIG, score)
    noise = gumbel_noise(token.to(tl.uint32, bitcast=True), key_low, key_high)
    score = (score - largest) / tl.maximum(temperature, _TINY) + tl.where(temperature > 0, noise, 0.0)
    best, first = best_of(score, token, inside)
    out = row * blocks + tl.program_id(1)
    tl.store(VALUES + out, best)
    tl.store(IDS + out, first)


@jit
def _best_of_row(VALUES, IDS, TOKENS, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCKS)
    inside = i < blocks
    value = tl.load(VALUES + row * blocks + i, mask=inside, other=float("-inf"))
    token = tl.load(IDS + row * blocks + i, mask=inside, other=NO_ID)
    best, first = best_of(value, token, inside)
    tl.store(TOKENS + row, tl.where(best > float("-inf"), first, _NO_TOKEN).to(tl.int64))  # NaN compares false


def greedy(logits: Tensor) -> Tensor:
    """The best token of each row, the lowest id among equals. logits [B, V] -> [B] int64.

    NO_TOKEN (-1) where a row is no distribution: it holds NaN, or only -inf. Equal to minillm.sampler.greedy, without
    the wait for the GPU. fp16, bf16 (GPU only) or fp32. Raises MinillmError for a wrong shape, dtype or stride.
    """
    _expect(logits)
    return _best_of_rows(*_block_maxima(logits, pick("sample", logits.device)))


def gumbel_sample(logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
    """Draw a token from softmax(logits / temperature) of each row: argmax of (logit - max) / temperature + noise.

    logits       [B, V] fp16, bf16 (GPU only) or fp32; +inf counts as logits.BIG
    keys         [B, 2] int32 of rng.keys: the draw's (seed, position)
    temperature  [B] fp32; 0 is greedy
    Returns [B] int64; NO_TOKEN (-1) for a row that is no distribution. The noise has the bits of rng.py, so these are
    the tokens that minillm.sampler draws without top-k, top-p and min-p, but for logarithms that round differently.
    The largest logit is subtracted first, so that a small temperature does not swallow the noise; that takes a second
    pass over the logits. Raises MinillmError for a wrong shape, dtype or stride.
    """
    _expect(logits)
    rows, vocab = logits.shape
    expect("keys", keys, (rows, 2), (torch.int32,), like=logits)
    expect("temperature", temperature, (rows,), (torch.float32,), like=logits)
    config = pick("sample", logits.device)
    maxima, ids = _block_maxima(logits, config)
    if rows:
        values = torch.empty(maxima.shape, dtype=torch.float32, device=logits.device)
        blocks = maxima.shape[1]
        _best_noisy_of_block[(rows, blocks)](
            logits, maxima, keys.contiguous(), temperature, values, ids, logits.stride(0), vocab,
            BLOCKS=triton.next_power_of_2(blocks), **config,
        )  # fmt: skip
        maxima = values
    return _best_of_rows(maxima, ids)


def _block_maxima(logits: Tensor, config: dict[str, int]) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, config["BLOCK"])
    values = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    if rows:
        _best_of_block[(rows, blocks)](logits, values, ids, logits.stride(0), vocab, **config)
    return values, ids


def _best_of_rows(values: Tensor, ids: Tensor) -> Tensor:
    rows, blocks = values.shape
    tokens = torch.empty((rows,), dtype=torch.int64, device=values.device)
    if rows:
        _best_of_row[(rows,)](values, ids, tokens, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1)
    return tokens


def _expect(logits: Tensor) -> None:
    expect("logits", logits, ("rows", "vocabulary"))
    if not 1 <= logits.shape[1] < 2**31 - 2**16:
        raise MinillmError(f"logits must have a vocabulary of 1 to 2^31 - 2^16 tokens, got {logits.shape[1]}")


_PAIRS = {"VALUES": "*fp32", "IDS": "*i32"}
AHEAD = [
    Ahead(
        f"greedy {dtype}", _best_of_block, "reduction",
        {"LOGITS": f"*{dtype}", "stride": "i32", "V": "i32"} | _PAIRS, {"BLOCK": 4096},
        num_warps=8, num_stages=1, wide=("stride",),
    )
    for dtype in ("bf16", "fp16", "fp32")
] + [
    Ahead(
        f"gumbel {dtype}", _best_noisy_of_block, "reduction",
        {"LOGITS": f"*{dtype}", "MAXIMA": "*fp32", "KEYS": "*i32", "TEMPERATURE": "*fp32", "stride": "i32", "V": "i32"}
        | _PAIRS, {"BLOCK": 4096, "BLOCKS": 32}, num_warps=8, num_stages=1, wide=("stride",),
    )
    for dtype in ("bf16", "fp32")
]  # fmt: skip
