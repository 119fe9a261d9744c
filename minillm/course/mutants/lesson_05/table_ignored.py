"""Pages taken in the order of the pool."""

import torch

TASK = "05.6"
POINTS = 1
HINT = "block table[i] of the pool"


def fold(m, l, acc, scores, v):
    m_new = torch.maximum(m, scores.max(-1).values)
    top = m_new.masked_fill(m_new == float("-inf"), 0.0)
    rescale = (m - top).exp()
    p = (scores - top[:, None]).exp()
    return (m_new, l * rescale + p.sum(-1), acc * rescale[:, None] + p @ v)


def attend_chunk(q, k, v, k_pool, v_pool, table, history):
    n, H, d = q.shape
    page, K = k_pool.shape[1:3]
    hidden = torch.ones(n, n).triu(1).bool()
    out = torch.empty_like(q)
    for h in range(H):
        kv = h // (H // K)
        state = (torch.full((n,), float("-inf")), torch.zeros(n), torch.zeros(n, d))
        query = q[:, h] / d**0.5
        for start in range(0, history, page):
            block, ours = (start // page, min(page, history - start))
            state = fold(*state, query @ k_pool[block, :ours, kv].T, v_pool[block, :ours, kv])
        scores = (query @ k[:, kv].T).masked_fill(hidden, float("-inf"))
        _, l, acc = fold(*state, scores, v[:, kv])
        out[:, h] = acc / l[:, None]
    return out
