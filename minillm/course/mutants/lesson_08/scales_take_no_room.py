"""Bytes of the codes only."""

import torch
from torch import Tensor

TASK = "08.4"
POINTS = 5
HINT = "scales and zeros take room"


class Int4Format:
    def __init__(self, group: int):
        self.group = group

    def pack(self, codes: Tensor) -> Tensor:
        return codes[:, 0::2] | (codes[:, 1::2] << 4)

    def dequantize(self, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        codes = torch.stack((packed & 15, packed >> 4), -1).view(*scale.shape, self.group)
        return (codes * scale[..., None] + zero[..., None]).flatten(1)

    def nbytes(self, n_out: int, n_in: int) -> int:
        return n_out * n_in // 2
