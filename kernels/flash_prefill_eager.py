"""Flash prefill in plain torch: the textbook oracle, the tiled twin of the kernel, and its bytes and FLOPs. Lesson 05.

The oracle writes each n x T matrix of scores. The twin walks over the same tiles as flash_prefill.py and can hand out
the running state after each, so that a debugger, a test or a picture follows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from minillm.kernels import online_softmax
from torch import Tensor

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x log2(e)): GPUs have an instruction for exp2
Watch = Callable[[int, int, int, int, Tensor, Tensor, Tensor], None]


def flash_prefill_reference(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, cu_seqlens: Tensor,
    history_lens: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    softmax_scale: float | None = None,
) -> Tensor:  # fmt: skip
    """The textbook way, which writes each matrix of scores: gather, q k^T, mask, softmax, product. Shapes as below.

    Computes in the dtype of q: float64 for an oracle.
    """
    _, H, d = q.shape
    K = k.shape[1]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out = torch.empty_like(q)
    for b, (begin, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        n, history = end - begin, int(history_lens[b])
        keys = torch.cat([_history(k_pool, k_scale, block_tables[b], history, q.dtype), k[begin:end].to(q.dtype)])
        values = torch.cat([_history(v_pool, v_scale, block_tables[b], history, q.dtype), v[begin:end].to(q.dtype)])
        scores = torch.einsum("nkgd,tkd->kgnt", q[begin:end].reshape(n, K, H // K, d), keys) * scale
        hidden = torch.ones(n, history + n, dtype=torch.bool, device=q.device).triu(history + 1)
        probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("kgnt,tkd->nkgd", probabilities, values).reshape(n, H, d)
    return out


def _history(pool: Tensor, scale: Tensor | None, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """[length, K, d]: the tokens of one sequence, gathered from its pages."""
    position = torch.arange(length, device=pool.device)
    block, offset = table[position // pool.shape[1]].long(), position % pool.shape[1]
    found = pool[block, offset].to(dtype)
    return found if scale is None else found * scale[block, offset].to(dtype)[..., None]


def flash_prefill_tiled(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, cu_seqlens: Tensor,
    history_lens: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    softmax_scale: float | None = None, *, block_m: int = 64, block_n: int = 64, watch: Watch | None = None,
) -> Tensor:  # fmt: skip
    """What the kernel does, tile by tile, with its roundings, in eager torch: a debugger can step here.

    watch(sequence, head, first_row, seen, m, l, acc) is called after each tile of keys: `seen` keys (history first) are
    folded in, m, l [rows] and acc [rows, d] are the running state. m is in base 2: a score times log2(e).
    """
    _, H, d = q.shape
    group = H // k.shape[1]
    scale = (d**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for b, (begin, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        history = int(history_lens[b])
        past_k = _history(k_pool, None, block_tables[b], history, q.dtype)
        past_ks = (
            _history(k_scale[..., None], None, block_tables[b], history, torch.float32) if k_scale is not None else None
        )
        past_v = _history(v_pool, v_scale, block_tables[b], history, torch.float32).to(q.dtype)
        for h in range(H):
            for first, rows, tiles in _tiles(end - begin, history, block_m, block_n):
                state = online_softmax.empty(rows, d, device=q.device)
                queries = q[begin + first : begin + first + rows, h].float()
                for start, stop, own in tiles:
                    source = slice(begin + start, begin + stop) if own else slice(start, stop)
                    keys, values = (x[source, h // group] for x in ((k, v) if own else (past_k, past_v)))
                    scores = queries @ keys.float().T
                    if not own and past_ks is not None:
                        scores = scores * past_ks[source, h // group, 0]
                    if own and stop > first:  # on the diagonal: row i sees its own keys 0 to i
                        row, key = torch.arange(first, first + rows)[:, None], torch.arange(start, stop)
                        scores = scores.masked_fill((key > row).to(scores.device), -torch.inf)
                    state = online_softmax.fold(state, scores * scale, values, torch.exp2)
                    if watch is not None:
                        watch(b, h, first, stop + (history if own else 0), *state)
                out[begin + first : begin + first + rows, h] = online_softmax.finish(state).to(q.dtype)
    return out


def _tiles(
    new: int, history: int, block_m: int, block_n: int
) -> Iterator[tuple[int, int, list[tuple[int, int, bool]]]]:
    """(first row, rows, [(first key, past the last key, whether they are new tokens)]) of each program of a head."""
    for first in range(0, new, block_m):
        last = min(first + block_m, new)
        pages = [(s, e, False) for s, e in _cut(history, history, block_n)]
        own = [(s, e, True) for s, e in _cut(first, last, block_n)]
        yield first, last - first, pages + own


def _cut(unmasked: int, stop: int, block_n: int) -> Iterator[tuple[int, int]]:
    """Keys 0 to stop in tiles: whole ones while all keys are below `unmasked`, then tiles of half the width."""
    whole, edge = unmasked // block_n * block_n, max(block_n // 2, 16)
    yield from ((s, s + block_n) for s in range(0, whole, block_n))
    yield from ((s, min(s + edge, stop)) for s in range(whole, stop, edge))


def flash_prefill_bytes(
    new_lens: Sequence[int], history_lens: Sequence[int], max_new: int, H: int, d: int, itemsize: int, *,
    block_size: int, block_m: int, block_n: int, kv_itemsize: int | None = None, scaled: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """(loaded, stored) bytes of a launch: each program reads its queries once, and all keys and values it may see.

    kv_itemsize: bytes of an element of the pools (None: as q); scaled: pools have scales. Caches answer most of it: the
    programs of one sequence and KV head read the same keys.
    """
    stored = sum(new_lens) * H * d * itemsize
    loaded = 8 * len(new_lens) * H * math.ceil(max_new / block_m)  # where a sequence begins and ends: empty tiles too
    of_history = 2 * ((kv_itemsize or itemsize) * d + (4 if scaled else 0))
    for new, history in zip(new_lens, history_lens):
        whole, edge = history // block_n * block_n, max(block_n // 2, 16)
        entries = whole if block_size < block_n else whole // block_n  # of the block table: one where a tile has a page
        entries += history - whole if block_size < edge else math.ceil((history - whole) / edge)
        for first in range(0, new, block_m):
            own = min(first + block_m, new)
            rows = own - first
            loaded += H * (4 + rows * d * itemsize + 4 * entries + history * of_history + own * 2 * d * itemsize)
    return loaded, stored


def attention_flops(n: int, T: int, H: int, d: int, block_m: int | None = None) -> int:
    """FLOPs of the two products for the last n of T tokens, tiles of keys past the diagonal left out.

    block_m: rows of a query tile; None, one tile, is the whole n x T matrix. Naive or flash: the same number.
    """
    return 4 * d * H * visited(n, T, block_m)


def visited(n: int, T: int, block_m: int | None) -> int:
    """Scores that are computed for one head."""
    step = block_m or max(n, 1)
    return sum((min(a + step, n) - a) * (T - n + min(a + step, n)) for a in range(0, n, step))
