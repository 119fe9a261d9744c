"""The operators between two matrix products, compiled for this CPU: each is one pass over memory. Lesson 09 reads it.

Eager torch runs an operator at a time, and each writes its result to memory for the next one to read. Inductor, the
compiler behind `torch.compile`, writes one C++ loop for all of them and lets the system's compiler build it.

What `torch.compile` returns checks before every call that its arguments still fit, which costs more than a loop over
one row. Here shapes are known: only the number of rows changes, and it is a variable of the loop. So inductor is
called directly, once for each operator and shape, and the loop it returns is called without checks in front.

Products of matrices stay with oneDNN, and attention with torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.errors import MinillmError
from minillm.models.cpu_ops import CpuOps
from minillm.models.transformer import Transformer

EXAMPLE_ROWS = 8  # of the tensors an operator is traced with; the loop serves every number of rows


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor]:
    h = x.float()
    return ((h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight,)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return *_rms_norm(total, weight, eps), total


def _swiglu(gate_up: Tensor) -> tuple[Tensor]:
    """fp32 inside: within a loop that costs nothing and saves two roundings."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return ((F.silu(gate) * up).to(gate_up.dtype),)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    """sin is (-sin, sin), as `CpuOps.angles` makes it. fp32 inside."""
    first, second = x.float().chunk(2, dim=-1)
    (c, _), (_, s) = cos.float().chunk(2, dim=-1), sin.float().chunk(2, dim=-1)
    return (torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype),)


class CompiledOps(CpuOps):
    """`CpuOps` as compiled loops. Differs from it, and from `TorchOps`, by rounding only.

    A loop is made for the shape behind the rows and for torch's number of threads at that moment: set the threads
    first. Loops are compiled when first needed; `compile_ops` needs them all at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loops: dict[tuple, Callable[[list[Tensor]], Any]] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        loop = self._loops.get(("rms_norm", x.shape[1:], eps))
        return (loop or self._make("rms_norm", partial(_rms_norm, eps=eps), (x,), (weight,), eps))([x, weight])[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        loop = self._loops.get(("add_rms_norm", x.shape[1:], eps))
        if loop is None:
            loop = self._make("add_rms_norm", partial(_add_rms_norm, eps=eps), (x, residual), (weight,), eps)
        return loop([x, residual, weight])

    def swiglu(self, gate_up: Tensor) -> Tensor:
        loop = self._loops.get(("swiglu", gate_up.shape[1:], None))
        return (loop or self._make("swiglu", _swiglu, (gate_up,)))([gate_up])[0]

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        loop = self._loops.get(("rope", x.shape[1:], None))
        return (loop or self._make("rope", _rope, (x, cos, sin)))([x, cos, sin])[0]

    def _make(
        self, name: str, operator: Callable, rows: tuple[Tensor, ...], rest: tuple[Tensor, ...] = (), eps: Any = None
    ) -> Callable[[list[Tensor]], Any]:
        """rows: arguments whose first dimension is the number of rows; rest: those of a fixed shape."""
        self._loops[name, rows[0].shape[1:], eps] = loop = compile_loop(operator, rows, rest)
        return loop


@torch.inference_mode(False)
@torch.no_grad()
def compile_loop(
    operator: Callable[..., tuple[Tensor, ...]], rows: tuple[Tensor, ...], rest: tuple[Tensor, ...] = ()
) -> Callable[[list[Tensor]], Any]:
    """One compiled loop for operator(*rows, *rest), called with a list of its arguments.

    Layouts are those of the arguments given, except for the number of rows. Raises MinillmError where nothing can be
    compiled.
    """
    from torch._dynamo.source import ConstantSource
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes = ShapeEnv()
    fake = FakeTensorMode(shape_env=shapes)
    symbol = shapes.create_symbol(EXAMPLE_ROWS, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
    n = shapes.create_symintnode(symbol, hint=EXAMPLE_ROWS)
    with fake:
        made = [torch.empty_strided((n, *t.shape[1:]), t.stride(), dtype=t.dtype) for t in rows]
        made += [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in rest]
    # In this process alone. The threads are written into the loop, so inductor's store must tell them apart.
    options = {"compile_threads": 1, "cpp.threads": torch.get_num_threads()}
    try:
        with torch._guards.tracing(torch._guards.TracingContext(fake)), config.patch(options):
            graph = make_fx(operator, decomposition_table=select_decomp_table())(*made)
            compiled: Any = compile_fx_inner(graph, made)
    except Exception as e:
        raise MinillmError(
            "compile=True: an operator could not be compiled. The C++ compiler needs a C++20 library, Python's headers "
            f"and OpenMP; without them leave compile=False. {type(e).__name__}: {str(e).strip()[:300]}"
        ) from e
    return compiled.current_callable


def expect_compilation(device: torch.device) -> None:
    """Raise MinillmError unless the device is a CPU and inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if device.type != "cpu":
        raise MinillmError(f"compile=True is for models on a CPU, this one is on {device}; leave compile=False")
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError) as e:  # OSError: CXX names what cannot be run
        raise MinillmError(
            "compile=True needs a C++ compiler, and none was found: install g++ or clang++, or name one in the "
            "environment variable CXX, or leave compile=False"
        ) from e


def compile_ops(model: Transformer) -> Transformer:
    """Switch a model on a CPU, in place, to `CompiledOps`, all compiled when this returns.

    Raises MinillmError without a C++ compiler. Inductor keeps what it made in a folder, so later starts are quicker.
    """
    from minillm.attention.causal import NoCacheAttention
    from minillm.attention.protocol import Batch, Row

    expect_compilation(model.device)
    model.ops = CompiledOps()
    for rows in (EXAMPLE_ROWS, 1):  # two prompts meet every operator and shape there is
        model.forward(Batch.build([Row(0, 0, rows)], [0] * rows), NoCacheAttention())
    return model
