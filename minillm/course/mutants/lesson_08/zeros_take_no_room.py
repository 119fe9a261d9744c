"""Bytes of the zeros are missing."""

import torch
from torch import Tensor

TASK = "08.4"
POINTS = 5
HINT = "a scale and a zero: four bytes"


class Int4Format:
    def __init__(self, group: int):
        self.group = group

    def pack(self, codes: Tensor) -> Tensor:
        return codes[:, 0::2] | (codes[:, 1::2] << 4)

    def dequantize(self, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        codes = torch.stack((packed & 15, packed >> 4), -1).view(*scale.shape, self.group)
        return (codes * scale[..., None] + zero[..., None]).flatten(1)

    def nbytes(self, n_out: int, n_in: int) -> int:
        return n_out * n_in // 2 + n_out * (n_in // self.group) * 2
