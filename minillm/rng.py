"""Random numbers as a function: the noise of a token is a hash of (seed, position, token id). Lesson 03 builds this.

A generator object has a state, and a state depends on what was drawn before: on batch order, on batch size, on
which rank draws, on whether a request was preempted and computed again. A counter-based generator has none
(Salmon et al., 2011): number i is computed from i alone. Two choices are made here.

Gumbel-max instead of an inverse CDF. `argmax(logit + gumbel)` draws from softmax(logit) (Gumbel, 1954). It needs no
normalised probabilities and no running sum over the vocabulary, so a shard of the vocabulary can draw its own winner
and the shards compare winners; a GPU kernel does it in one pass. And it is steady: a rounding difference in one
logit moves that token's score only, while in an inverse CDF it moves the boundaries of all tokens behind it.

A 32-bit integer hash instead of Philox. A whole row of noise is wanted at every step, 49,152 numbers. Ten rounds of
Philox need 32 x 32 -> 64 bit products, milliseconds a row in torch on a CPU. Two rounds of `lowbias32` (Wellons, 2018,
"hash prospector"), each keyed by half of a 64-bit key, need a fraction of one, and the same bits come out of uint32
arithmetic in a GPU kernel. This is not a cryptographic generator and need not be one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_MASK64 = 2**64 - 1
_LARGEST_BELOW_ONE = 1 - 2**-24  # in fp32; keeps every noise finite


def mix64(x: int) -> int:
    """Finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit numbers, each bit a mix of all."""
    x &= _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def key(seed: int, position: int) -> int:
    """The 64-bit key of one draw. `position` is the index in the sequence of the token that is drawn."""
    return mix64(mix64(seed + 0x9E3779B97F4A7C15) + position)


def keys(draws: Iterable[tuple[int, int]], device: torch.device | str = "cpu") -> Tensor:
    """Keys of many draws (seed, position), as int32 [B, 2]: low half, high half."""
    halves = [[_signed(k & 0xFFFFFFFF), _signed(k >> 32)] for k in (key(*draw) for draw in draws)]
    return torch.tensor(halves, dtype=torch.int32, device=device).view(-1, 2)


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """fp32 [B, K] in (0, 1): one number for each key [B, 2] and token id [B, K] (or [K], the same for every row).

    The top 31 bits of resolution lie next to 0, where `gumbel` is largest: a token of probability 1e-9 still
    has its chance.
    """
    x = _mix32(token_ids.to(torch.int32) ^ keys[:, :1])
    x = _mix32(x ^ keys[:, 1:])
    return (x & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise -log(E), E = -log(1 - u) exponential; fp32 [B, K], always finite."""
    return uniform(keys, token_ids).neg_().log1p_().neg_().log_().neg_()


def _mix32(x: Tensor) -> Tensor:
    """lowbias32 in place. int32 holds the bits of uint32: products wrap, and shifts are masked to be logical."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _signed(bits: int) -> int:
    """The int32 with these 32 bits."""
    return bits - 2**32 if bits >= 2**31 else bits
