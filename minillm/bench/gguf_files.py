"""GGUF files of the weights that minillm runs, for llama.cpp: the same numbers in another container.

The source is quantised (Q4_1). It is dequantised and rounded to bf16, as minillm's own folder was, and then written as
BF16 or F32: both sides read the same values.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError
from minillm.paths import cache_dir

KINDS = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}


def in_dtype(source: Path, dtype: str) -> Path:
    """`source` with its matrices in `dtype`; made once and kept in the user cache. Raises MinillmError."""
    try:
        with source.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise MinillmError(f"--gguf {source} cannot be read ({error.strerror}); give a GGUF file") from None
    target = cache_dir() / "gguf" / f"{sha256[:16]}.{KINDS[dtype]}.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        convert(source, part, KINDS[dtype])
        part.replace(target)
    return target


def convert(source: Path, target: Path, kind: str) -> None:
    """Write every matrix of a GGUF file as `kind` ("BF16", "F16" or "F32"), vectors as F32, all else as it is."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    try:
        reader = GGUFReader(source)
    except (ValueError, OSError, IndexError) as error:
        raise MinillmError(f"{source} cannot be read as GGUF ({error}); give a GGUF file of these weights") from None
    architecture = reader.fields["general.architecture"].contents()
    types: Any = GGMLQuantizationType
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(LlamaFileType.ALL_F32 if kind == "F32" else LlamaFileType[f"MOSTLY_{kind}"])
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        values = dequantize(quantize(values, types.BF16), types.BF16).astype(np.float32).reshape(shape)
        if kind == "F32" or values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, types[kind]), raw_dtype=types[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
