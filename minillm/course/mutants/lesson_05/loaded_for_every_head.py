"""Each head loads the tile again."""

import torch

TASK = "05.4"
POINTS = 6
HINT = "all heads use it"


def fold(m, l, acc, scores, v):
    m_new = torch.maximum(m, scores.max(-1).values)
    top = m_new.masked_fill(m_new == float("-inf"), 0.0)
    rescale = (m - top).exp()
    p = (scores - top[:, None]).exp()
    return (m_new, l * rescale + p.sum(-1), acc * rescale[:, None] + p @ v)


def flash(q, load, block_m, block_n):
    S, H, d = q.shape
    out = torch.empty_like(q)
    for first in range(0, S, block_m):
        last = min(first + block_m, S)
        rows = torch.arange(first, last)
        n = last - first
        states = [(torch.full((n,), float("-inf")), torch.zeros(n), torch.zeros(n, d)) for _ in range(H)]
        for start in range(0, last, block_n):
            stop = min(start + block_n, S)
            keys = torch.arange(start, stop)
            for h in range(H):
                k, v = load(start, stop)
                kv = h // (H // k.shape[1])
                scores = q[first:last, h] @ k[:, kv].T / d**0.5
                scores = scores.masked_fill(keys > rows[:, None], float("-inf"))
                states[h] = fold(*states[h], scores, v[:, kv])
        for h, (_, l, acc) in enumerate(states):
            out[first:last, h] = acc / l[:, None]
    return out
