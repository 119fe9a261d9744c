"""Each group is scaled as its right neighbour."""

import torch
from torch import Tensor

TASK = "08.4"
POINTS = 4
HINT = "group off by one"


class Int4Format:
    def __init__(self, group: int):
        self.group = group

    def pack(self, codes: Tensor) -> Tensor:
        return codes[:, 0::2] | (codes[:, 1::2] << 4)

    def dequantize(self, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        after = lambda p: torch.cat((p[:, 1:], p[:, -1:]), 1)[..., None]
        codes = torch.stack((packed & 15, packed >> 4), -1).view(*scale.shape, self.group)
        return (codes * after(scale) + after(zero)).flatten(1)

    def nbytes(self, n_out: int, n_in: int) -> int:
        return n_out * n_in // 2 + n_out * (n_in // self.group) * 4
