"""A message as bytes, and what is refused before a byte of it is believed. Lesson 15 needs it.

A frame is a prefix of 16 bytes (magic, length of the header, length of the payload), a header in JSON (the message;
dtype and shape of each tensor), and the tensors' bytes one after the other. Never pickle: that runs what it reads.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.cluster.transport import Message
from minillm.errors import MinillmError

PREFIX = struct.Struct("<4sIQ")
MAGIC = b"mlm1"
MAX_HEADER_BYTES = 16 << 20  # a prompt of a million tokens as JSON is about 7 MB
MAX_PAYLOAD_BYTES = 1 << 30
MAX_TENSORS = 1024
MAX_DIMS = 8
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.uint8,
              torch.int32, torch.int64)
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """dtype and shape of a tensor that is to come."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def encode(message: Message, tensors: Sequence[Tensor] = ()) -> tuple[bytes, int]:
    """(prefix and header, payload bytes) of a frame. Raises MinillmError with what cannot be sent."""
    if not isinstance(message, dict):
        raise MinillmError(f"a message is a dict of JSON values, got {type(message).__name__}")
    if len(tensors) > MAX_TENSORS:
        raise MinillmError(f"a message carries at most {MAX_TENSORS} tensors, got {len(tensors)}")
    specs = []
    for t in tensors:
        name = str(t.dtype).removeprefix("torch.")
        if name not in DTYPES or t.dim() > MAX_DIMS:
            raise MinillmError(
                f"a tensor of {name} with {t.dim()} dimensions cannot be sent; dtypes: {', '.join(DTYPES)}"
            )
        specs.append([name, list(t.shape)])
    try:
        header = json.dumps({"message": message, "tensors": specs}, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise MinillmError(f"a message is made of JSON values only: {error!s:.200}") from error
    payload = sum(t.nbytes for t in tensors)
    _judge_sizes(len(header), payload)
    return PREFIX.pack(MAGIC, len(header), payload) + header, payload


def judge_prefix(prefix: bytes | bytearray) -> tuple[int, int]:
    """(header bytes, payload bytes) of the frame that begins so. Raises MinillmError before anything is allocated."""
    magic, header, payload = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise MinillmError(f"this is no frame: it begins with {magic!r}, not {MAGIC!r}")
    _judge_sizes(header, payload)
    return header, payload


def judge_header(header: bytes | bytearray, payload: int) -> tuple[Message, list[TensorSpec]]:
    """The message, and the tensors that the payload is made of. Raises MinillmError if they are not what they claim."""
    try:
        said = json.loads(header)
        message, specs = said["message"], said["tensors"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise MinillmError(f"the header of a frame is not what it should be: {error!r:.200}") from error
    if not isinstance(message, dict) or not isinstance(specs, list) or len(specs) > MAX_TENSORS:
        raise MinillmError(f"a header holds a message and at most {MAX_TENSORS} tensors")
    tensors = [_spec(spec) for spec in specs]
    if (total := sum(t.nbytes for t in tensors)) != payload:
        raise MinillmError(f"the tensors of a frame take {total} bytes, and it announced {payload}")
    return message, tensors


def as_bytes(t: Tensor) -> memoryview:
    """t's bytes in row-major order, on the CPU: t's own memory where it is like that already."""
    return t.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data


def empty(spec: TensorSpec) -> Tensor:
    """A new tensor, to be filled through `as_bytes`."""
    return torch.empty(spec.shape, dtype=spec.dtype)


def _judge_sizes(header: int, payload: int) -> None:
    if header > MAX_HEADER_BYTES or payload > MAX_PAYLOAD_BYTES:
        raise MinillmError(
            f"a frame has at most {MAX_HEADER_BYTES} bytes of header and {MAX_PAYLOAD_BYTES} of tensors, "
            f"got {header} and {payload}: send it in pieces"
        )


def _spec(spec: object) -> TensorSpec:
    if not (isinstance(spec, list) and len(spec) == 2 and isinstance(spec[0], str) and isinstance(spec[1], list)):
        raise MinillmError(f"a tensor is announced as [dtype, shape], got {spec!r:.80}")
    name, shape = spec
    if name not in DTYPES or len(shape) > MAX_DIMS:
        raise MinillmError(f"a tensor of {name!r:.40} with {len(shape)} dimensions cannot be received")
    if not all(type(n) is int and 0 <= n <= MAX_PAYLOAD_BYTES for n in shape):
        raise MinillmError(f"the sizes of a tensor are from 0 to {MAX_PAYLOAD_BYTES}, got {shape!r:.80}")
    return TensorSpec(DTYPES[name], tuple(shape))
