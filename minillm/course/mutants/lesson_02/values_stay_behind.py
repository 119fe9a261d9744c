"""Keys move, values stay."""

import torch

TASK = "02.7"
POINTS = 3
HINT = "copies keys and values"


class KVCache:
    def __init__(self, config, num_rows, length, dtype, device="cpu"):
        shape = (config.num_layers, num_rows, config.num_kv_heads, length, config.head_dim)
        self.k, self.v = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def write(self, layer, k, v, plan):
        first = 0
        for row, start, n in plan:
            for cache, new in ((self.k, k), (self.v, v)):
                cache[layer, row, :, start : start + n] = new[first : first + n].transpose(0, 1)
            first += n

    def forward(self, layer, q, plan):
        out, first = [], 0
        for row, start, n in plan:
            k, v = self.k[layer, row], self.v[layer, row]
            out.append(self.attend(q[first : first + n], k, v, start))
            first += n
        return torch.cat(out)

    def attend(self, q, k, v, start):
        n, heads, dim = q.shape
        total = start + n
        k, v = (x[:, :total].repeat_interleave(heads // len(x), 0) for x in (k, v))
        scores = torch.einsum("nhd,htd->hnt", q, k) / dim**0.5
        scores = scores.masked_fill(~torch.ones(n, total).tril(start).bool(), float("-inf"))
        return torch.einsum("hnt,htd->nhd", scores.softmax(-1), v)

    def move(self, source, target, length):
        self.k[:, target, :, :length] = self.k[:, source, :, :length]
