"""Weights in eight or four bits, activations as they were: fewer bytes a step. Lesson 08 builds it.

int8: symmetric, one scale an output. int4: asymmetric, a scale and a zero for each group of inputs. Both round to the
nearest code and look at nothing but the weight, as the baselines of Dettmers et al. (2022, LLM.int8()), Frantar et al.
(2022, GPTQ) and Lin et al. (2023, AWQ) do; those papers say what more can be won with calibration data.

Scales and zeros are rounded to bf16 before the codes are chosen. So every kernel, whichever dtype it keeps them in,
means the same weights, and the error of a weight stays within half a step.

Which matrices: qkv, o, gate_up, down. Not the embedding, of which a step reads a row a token. Not the head by default:
its rounding goes straight into the scores, and a tied head is the embedding. `head=True` quantises it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.device import expect_triton
from minillm.errors import MinillmError
from minillm.models.cpu_ops import CpuOps
from minillm.models.linear import Linear
from minillm.models.transformer import Transformer

GROUPS = (32, 64, 128)
LINEARS = ("qkv", "o", "gate_up", "down")
ROUNDING = 1  # raised when the same weight gets other codes: a quality report is of one rounding
SMALLEST = 1e-30  # a row or group below this is zero
FEW_ROWS = 16  # above, torch's CPU kernels for codes lose to dequantising once and multiplying


@dataclass(frozen=True)
class Scheme:
    """How weights are stored. name as users write it; bits a code; group: inputs that share a scale, 0 for all."""

    name: str
    bits: int
    group: int = 0

    def weight_bytes(self, n_out: int, n_in: int) -> int:
        """Bytes of the codes, and of the bf16 scales (int8), or scales and zeros (int4), of one matrix."""
        parameters = 2 if self.group == 0 else 4 * (n_in // self.group)
        return n_out * n_in * self.bits // 8 + n_out * parameters


SCHEMES = {"int8": Scheme("int8", 8), "int4": Scheme("int4", 4, 32)}
SCHEMES |= {f"int4-g{g}": Scheme(f"int4-g{g}", 4, g) for g in GROUPS}


def scheme_of(name: str | Scheme) -> Scheme:
    """ "int8", "int4" (groups of 32), "int4-g64" ... Raises MinillmError for another name."""
    if isinstance(name, Scheme):
        return name
    if not isinstance(name, str) or name not in SCHEMES:
        raise MinillmError(f"quantization {name!r} is not known; use {', '.join(map(repr, SCHEMES))}")
    return SCHEMES[name]


# Codes ----------------------------------------------------------------------------------------------------------------


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> codes int8 [out, in] from -127 to 127, scale fp32 [out]; weight = codes * scale +- scale/2.

    The scale is max|row| / 127, rounded to a bf16 value. Raises MinillmError when a weight is not finite.
    """
    w = _judged(weight)
    scale = _bf16(w.abs().amax(1) / 127)
    return (w / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def dequantize_int8(codes: Tensor, scale: Tensor) -> Tensor:
    """codes int8 [out, in], scale [out] -> fp32 [out, in]."""
    return codes.float() * scale.float()[:, None]


def quantize_int4(weight: Tensor, group: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in] -> (packed uint8 [out, in/2], scale bf16 [out, in/group], zero bf16 [out, in/group]).

    weight = (code - 8) * scale + zero +- scale/2, codes 0 to 15; zero is what the middle code 8 stands for. Input 2j is
    the low half of byte j, 2j+1 the high half. A group's range always reaches 0: without that a group far from 0
    would have a zero too coarse in bf16. Raises MinillmError when `in` is no multiple of the group.
    """
    if group not in GROUPS:
        raise MinillmError(f"int4: the group must be {', '.join(map(str, GROUPS))} inputs, got {group!r}")
    w = _judged(weight)
    n_out, n_in = w.shape
    if n_in % group:
        fits = [g for g in GROUPS if n_in % g == 0]
        hint = f"use a group of {fits[-1]}" if fits else "use int8 for this model"
        raise MinillmError(f"int4: a weight with {n_in} inputs cannot be cut into groups of {group}; {hint}")
    w = w.view(n_out, n_in // group, group)
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    scale = _bf16((high - low) / 15)
    zero = (low + 8 * scale).bfloat16()
    zero = torch.where(high - low < 15 * SMALLEST, 0, zero)
    codes = ((w - zero.float()[..., None]) / scale[..., None]).round().add(8).clamp(0, 15).to(torch.uint8)
    return pack_int4(codes.view(n_out, n_in)), scale.bfloat16(), zero


def dequantize_int4(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """packed uint8 [out, in/2], scale and zero [out, in/group] -> fp32 [out, in]."""
    return _affine(unpack_int4(packed), scale.float(), zero.float())


def pack_int4(codes: Tensor) -> Tensor:
    """codes [out, in] from 0 to 15 -> uint8 [out, in/2]: input 2j in the low four bits of byte j, 2j+1 in the high."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_int4(packed: Tensor) -> Tensor:
    """uint8 [out, in/2] -> codes uint8 [out, in]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def _affine(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    grouped = codes.view(len(codes), scale.shape[1], -1).to(scale.dtype)
    return ((grouped - 8) * scale[..., None] + zero[..., None]).view(len(codes), -1)


def _judged(weight: Tensor) -> Tensor:
    if weight.dim() != 2 or not weight.numel():
        raise MinillmError(f"a weight to quantise must be [out, in], got {list(weight.shape)}")
    w = weight.float()
    if not bool(w.isfinite().all()):
        raise MinillmError("a weight to quantise holds inf or NaN; check the checkpoint")
    return w


def _bf16(x: Tensor) -> Tensor:
    """The nearest bf16 value of a step x, as fp32. It may be short by 2^-9: at 127 steps a quarter of one is lost."""
    return torch.where(x < SMALLEST, 1.0, x.bfloat16().float())


# A linear of codes ----------------------------------------------------------------------------------------------------


class QuantLinear(Linear):
    """x [N, in] -> [N, out] with codes for a weight; called, packed and read like a `Linear`.

    On a GPU the Triton kernels multiply. On a CPU in bf16, few rows go to torch's own kernels for codes; more rows, and
    every other dtype, are multiplied by the dequantised weight, which is made anew at each call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, scheme: str | Scheme = "int8"):
        """weight [out, in] in the dtype that x will have; it is read, not kept."""
        self.scheme = scheme_of(scheme)
        self.weight = None
        self.bias = bias
        self.dtype = weight.dtype
        self.out_features, self.in_features = weight.shape
        self._packed: Any = None  # int4 in the order of torch's CPU kernel, with its scales and zeros
        self._scale_zero: Any = None
        self.zero: Any = None
        self.codes: Any
        self.scale: Any
        if self.scheme.bits == 8:
            self.codes, scale = quantize_int8(weight)
            self.scale = scale.bfloat16()  # nothing is lost: it is a bf16 value
        else:
            self.codes, self.scale, self.zero = quantize_int4(weight, self.scheme.group)

    @property
    def nbytes(self) -> int:
        held = (self.codes, self.scale, self.zero, self._packed, self._scale_zero, self.bias)
        return sum(t.nbytes for t in held if t is not None)

    def pack(self) -> QuantLinear:
        """int4 on a CPU in bf16: reorder the codes for torch's kernel, and let the plain ones go."""
        if self.codes is None or self.codes.device.type != "cpu" or self.scheme.bits == 8 or not self._has_cpu_kernel():
            return self
        codes = unpack_int4(self.codes)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        if not torch.equal(_unpacked(packed, self.out_features), codes):
            return self  # an order this file cannot read back, as more rows need: keep the plain codes
        self._packed = packed
        self._scale_zero = torch.stack((self.scale.t(), self.zero.t()), -1).contiguous()  # [in/group, out, 2]
        self.codes = self.scale = self.zero = None
        return self

    def dequantize(self) -> Tensor:
        """The weight that the codes stand for, fp32 [out, in]."""
        return self._dequantize(torch.float32)

    def steps(self) -> Tensor:
        """The distance between two codes at each weight, fp32 [out, in]: rounding is off by half of it at most."""
        if self.scheme.group == 0:
            return self.scale.float()[:, None].expand(self.out_features, self.in_features)
        scale = self.scale if self._scale_zero is None else self._scale_zero[..., 0].t()
        return scale.float().repeat_interleave(self.scheme.group, 1)

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        if self._packed is not None:
            codes = _unpacked(self._packed, self.out_features)
            scale, zero = (p.t().to(dtype) for p in self._scale_zero.unbind(-1))
            return _affine(codes, scale, zero)
        if self.zero is None:
            return self.codes.to(dtype) * self.scale.to(dtype)[:, None]
        return _affine(unpack_int4(self.codes), self.scale.to(dtype), self.zero.to(dtype))

    def _has_cpu_kernel(self) -> bool:
        """torch 2.13: bf16 alone is fast (fp32 is a plain loop). Both kernels accumulate in fp32.

        The kernel for int8 reads 16 inputs at a time, past the end of a row that is no multiple.
        """
        if self.dtype != torch.bfloat16:
            return False
        if self.scheme.bits == 8:
            return self.in_features % 16 == 0
        return self.out_features % 64 == 0 and self.in_features % 32 == 0

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            y = self._on_gpu(x)
        elif len(x) > FEW_ROWS or not self._has_cpu_kernel() or (self._packed is None and self.scheme.bits == 4):
            return F.linear(x, self._dequantize(x.dtype), self.bias)
        elif self._packed is None:
            y = torch._weight_int8pack_mm(x, self.codes, self.scale)
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, self.scheme.group, self._scale_zero)
        return y if self.bias is None else y + self.bias

    def _on_gpu(self, x: Tensor) -> Tensor:
        from minillm.kernels.quant_linear import int4_linear, int8_linear

        if self.zero is None:
            return int8_linear(x, self.codes, self.scale)
        return int4_linear(x, self.codes, self.scale, self.zero)


def _unpacked(packed: Tensor, n_out: int) -> Tensor:
    """Codes [out, in] from the order of torch's kernel on a CPU with AVX-512.

    Blocks of 64 outputs; in a block, one input after the other; in a byte, outputs i and i + 32.
    """
    if n_out % 64:
        return packed.new_empty(0)
    blocks = packed.view(n_out // 64, -1, 32)
    return torch.cat((blocks & 15, blocks >> 4), -1).transpose(1, 2).reshape(n_out, -1)


def quantize_model(transformer: Transformer, scheme: str | Scheme, head: bool = False) -> Transformer:
    """Replace the linears of a transformer by `QuantLinear`s, in place, each plain weight let go before the next.

    The transformer must not be packed yet (`pack=False`). On a CPU everything is packed here, the head too, so nothing
    is left to do. head: quantise the head as well (the embedding keeps its plain table). Raises MinillmError for an
    unknown scheme, for sizes that the groups do not divide, for a model whose plain weights are gone, and on a GPU
    without Triton.
    """
    chosen = scheme_of(scheme)
    if transformer.device.type == "cuda":
        expect_triton("plain weights")
    for layer in transformer.layers:
        for name in LINEARS:
            setattr(layer, name, _quantized(getattr(layer, name), chosen))
            setattr(layer.w, name, None)
    if head:
        transformer.lm_head = _quantized(transformer.lm_head, chosen)
    else:
        transformer.lm_head.pack()
    if transformer.device.type == "cpu":
        transformer.ops = CpuOps()
    return transformer


def _quantized(linear: Linear, scheme: Scheme) -> QuantLinear:
    if linear.weight is None:
        raise MinillmError("this model is packed or quantised already, its plain weights are gone; load it again")
    made = QuantLinear(linear.weight, linear.bias, scheme).pack()
    linear.weight = None
    return made
