"""The layers that need the other ranks: row-parallel linears, the vocabulary-parallel embedding and head. Lesson 14.

A column-parallel linear needs nobody: it is a `Linear` with fewer outputs. What follows it, up to the row-parallel one,
works on a rank's own heads or intermediate values. So half a layer costs one all-reduce (Shoeybi et al., 2019).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.models.transformer import Transformer
from minillm.parallel.group import Group
from minillm.parallel.shard import Place


class RowParallelLinear:
    """y = sum over ranks of x_k W_k^T, and the bias, which one rank has. x [N, in / tp], its own part -> [N, out]."""

    def __init__(self, linear: Callable[[Tensor], Tensor], group: Group):
        self.linear, self.group = linear, group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.linear(x))


class VocabParallelEmbedding:
    """Each rank has V / tp rows of the table: a token's row comes from one, zeros from the others. [N] -> [N, D]."""

    def __init__(self, table: Tensor, group: Group):
        self.table, self.group = table, group
        self.start = group.rank * len(table)

    def __call__(self, token_ids: Tensor) -> Tensor:
        local = token_ids - self.start
        here = (local >= 0) & (local < len(self.table))
        rows = F.embedding(torch.where(here, local, 0), self.table)
        return self.group.all_reduce(rows.masked_fill_(~here.unsqueeze(-1), 0))


class VocabParallelHead:
    """Each rank scores its V / tp tokens; together they are all. [R, D] -> [R, V], on every rank."""

    def __init__(self, linear: Callable[[Tensor], Tensor], group: Group):
        self.linear, self.group = linear, group

    def __call__(self, hidden: Tensor) -> Tensor:
        return torch.cat(self.group.all_gather(self.linear(hidden)), dim=-1)


def parallelise(model: Transformer, group: Group, place: Place) -> Transformer:
    """Make a model that holds one rank's weights work with the others, in place. group: the ranks of its stage.

    After packing or quantising: it wraps whatever the linears are by then.
    """
    model.first, model.last = place.first, place.last
    if group.size == 1:
        return model
    for layer in model.layers:
        layer.o = RowParallelLinear(layer.o, group)  # type: ignore[assignment]
        layer.down = RowParallelLinear(layer.down, group)  # type: ignore[assignment]
    if place.first:
        model.embedding = VocabParallelEmbedding(model.embed, group)
    if place.last:
        model.lm_head = VocabParallelHead(model.lm_head, group)  # type: ignore[assignment]
    return model
