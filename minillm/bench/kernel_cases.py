"""What `bench kernels` runs: each kernel on shapes of real models, its float64 reference, its peers in torch.

Bytes here are those of different addresses: what must cross the bus when the cache is cold. Lessons 04 to 08.

The linears of codes are timed beside torch's product of plain weights. That is the speed of a kernel on random weights
and no claim about a model: `bench quant` makes those, and asks for a quality report first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minillm.config import ModelConfig
from minillm.kernels import configs
from minillm.kernels.flash_prefill import flash_prefill
from minillm.kernels.flash_prefill_eager import flash_prefill_reference
from minillm.kernels.paged_decode import paged_decode, paged_decode_reference
from minillm.kernels.quant_int4 import int4_linear, int4_linear_reference
from minillm.kernels.quant_linear import int8_linear, int8_linear_reference
from minillm.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from minillm.kernels.rope_kv import rope_kv_bytes, rope_kv_reference, rope_kv_write
from minillm.kernels.sample import greedy, greedy_bytes, greedy_reference
from minillm.kernels.swiglu import swiglu, swiglu_bytes, swiglu_reference
from minillm.models.presets import preset
from minillm.quant import SCHEMES, quantize_int4, quantize_int8
from minillm.roofline.cost import Op

MODELS = ("llama-3.1-8b", "qwen3-0.6b", "smollm2-135m")
PAGE = 16
EPS = 1e-5
Outputs = tuple[Tensor, ...]


@dataclass
class Inputs:
    """One set of tensors, ready to run. `run` gives what `reference` gives, in the kernel's dtype."""

    run: Callable[[], Outputs]
    reference: Callable[[], Outputs]
    peers: dict[str, Callable[[], Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A kernel on one shape. read, written: bytes in 16-bit types; `tuned` names its entry in configs.json."""

    kernel: str
    model: str
    shape: str
    goal: str  # "read", "copy", "flops" or "": what it is held against
    read: int
    written: int
    flops: int
    make: Callable[[str, torch.dtype, int], Inputs]
    tuned: str = ""
    asked: tuple[int, int] | None = None  # bytes that two launches ask for, with what passes between them

    @property
    def key(self) -> str:
        return f"{self.kernel}.{self.model}.{self.shape}"

    @property
    def op(self) -> Op:
        """For the roofline. Bytes are compulsory ones. Prefill meets the ceiling of products, decode that of reads."""
        kind = {"flops": "linear", "read": "attention"}.get(self.goal, "elementwise")
        rows = 4096 if kind == "linear" else 1
        return Op(self.kernel, kind, flops=self.flops, weights=self.read, kv_written=self.written, calls=1, rows=rows)


def cases(tiny: bool) -> Iterator[Case]:
    """All of them; `tiny`: a model of 64 wide, so that the interpreter can run them."""
    if tiny:
        config = ModelConfig(
            vocab_size=500, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16
        )
        yield from _of_model("tiny", config, rows=(3,), prompts=(40,), decodes=((2, 37),))
        return
    for name in MODELS:
        yield from _of_model(
            name, preset(name), rows=(512, 2048, 8192), prompts=(1024, 4096, 8192),
            decodes=((1, 4096), (8, 1024), (32, 1024), (32, 4096), (64, 2048)),
        )  # fmt: skip


def _of_model(
    name: str, c: ModelConfig, rows: tuple[int, ...], prompts: tuple[int, ...], decodes: tuple[tuple[int, int], ...]
) -> Iterator[Case]:
    for n in rows:
        yield from _elementwise(name, c, n)
    yield _greedy(name, c, 32 if rows[0] > 32 else rows[0])
    for n in (1, 2, 4, 16) if rows[0] > 32 else rows:
        yield from _codes(name, c, n)
    for n in prompts:
        yield _prefill(name, c, n)
    for batch, context in decodes:
        yield _decode(name, c, batch, context)


def _draw(device: str, dtype: torch.dtype, seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device).to(dtype)


def compiled(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """torch.compile of a reference, in the kernel's dtype: what one gets without writing a kernel.

    Made at its first call, so that a machine without a compiler can count.
    """
    made: list[Callable[..., Any]] = []

    def run() -> Any:
        if not made:
            made.append(torch.compile(fn, dynamic=False, fullgraph=True))
        return made[0](*args)

    return run


def _elementwise(model: str, c: ModelConfig, n: int) -> Iterator[Case]:
    D, I, K, H, d = c.hidden_size, c.intermediate_size, c.num_kv_heads, c.num_heads, c.head_dim

    def norm(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = _draw(device, dtype, seed)
        x, w = draw(n, D), draw(D)
        return Inputs(
            lambda: (rms_norm(x, w, EPS),),
            lambda: rms_norm_reference(x.double(), w.double(), EPS)[:1],
            {"torch": lambda: F.rms_norm(x, (D,), w, EPS)},
        )

    def add_norm(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = _draw(device, dtype, seed)
        x, r, w = draw(n, D), draw(n, D), draw(D)
        return Inputs(
            lambda: add_rms_norm(x, r, w, EPS),
            lambda: rms_norm_reference(x.double(), w.double(), EPS, r.double()),
            {"compile": compiled(rms_norm_reference, x, w, EPS, r)},
        )

    def activation(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        x = _draw(device, dtype, seed)(n, 2 * I)
        return Inputs(
            lambda: (swiglu(x),), lambda: (swiglu_reference(x.double()),), {"compile": compiled(swiglu_reference, x)}
        )

    def rope(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = _draw(device, dtype, seed)
        qkv, blocks = draw(n, H + 2 * K, d), -(-n // PAGE) + 1
        angles = torch.rand(n, d // 2, device=device)
        cos, sin = (torch.cat((f(angles),) * 2, -1).to(dtype) for f in (torch.cos, torch.sin))
        positions, slots = torch.arange(n, device=device), torch.arange(n, device=device) + PAGE
        pools = [torch.zeros(2, blocks, PAGE, K, d, dtype=dtype, device=device) for _ in range(2)]
        wide = [p.double() for p in pools]
        return Inputs(
            lambda: (*rope_kv_write(qkv, cos, sin, positions, slots, *pools[0], H), pools[0]),
            lambda: (
                *rope_kv_reference(qkv.double(), cos.double(), sin.double(), positions, slots, *wide[0], H), wide[0],
            ),
        )  # fmt: skip

    each = n * D * 2
    yield Case("rms_norm", model, f"rows{n}", "copy", each + D * 2, each, 0, norm, "rms_norm")
    yield Case("add_rms_norm", model, f"rows{n}", "copy", 2 * each + D * 2, 2 * each, 0, add_norm, "rms_norm")
    read, written = swiglu_bytes(n, I, 2)
    yield Case("swiglu", model, f"rows{n}", "copy", read, written, 0, activation, "swiglu")
    read, written = rope_kv_bytes(n, n, H, K, d, 2, 2, 2, block_heads=H + 2 * K)  # one program asks for each angle once
    yield Case("rope_kv", model, f"rows{n}", "copy", read, written, 0, rope, "rope_kv")


def _greedy(model: str, c: ModelConfig, n: int) -> Case:
    V = c.vocab_size

    def best(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        logits = _draw(device, dtype, seed)(n, V)
        return Inputs(
            lambda: (greedy(logits),), lambda: (greedy_reference(logits.double()),),
            {"torch": lambda: logits.argmax(-1)},
        )  # fmt: skip

    asked = greedy_bytes(n, V, 2, configs.pick("sample", "cpu")["BLOCK"])  # with the best of each block, twice
    return Case("greedy", model, f"rows{n}", "", n * V * 2, n * 8, 0, best, "sample", asked)


def _codes(model: str, c: ModelConfig, n: int) -> Iterator[Case]:
    """The widest product of a layer, gate and up, with its weight in eight or four bits."""
    n_in, n_out = c.hidden_size, 2 * c.intermediate_size

    def int8(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = _draw(device, dtype, seed)
        x, plain = draw(n, n_in), draw(n_out, n_in) * 0.02
        codes, scale = quantize_int8(plain)
        scale = scale.to(dtype)
        return Inputs(
            lambda: (int8_linear(x, codes, scale),), lambda: (int8_linear_reference(x.double(), codes, scale),),
            {"torch": lambda: F.linear(x, plain)},
        )  # fmt: skip

    def int4(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = _draw(device, dtype, seed)
        x, plain = draw(n, n_in), draw(n_out, n_in) * 0.02
        stored = [t if t.dtype == torch.uint8 else t.to(dtype) for t in quantize_int4(plain)]
        return Inputs(
            lambda: (int4_linear(x, *stored),), lambda: (int4_linear_reference(x.double(), *stored),),
            {"torch": lambda: F.linear(x, plain)},
        )  # fmt: skip

    flops, out = 2 * n * n_in * n_out, n * n_out * 2
    for name, make in (("int8", int8), ("int4", int4)):
        read = SCHEMES[name].weight_bytes(n_out, n_in) + n * n_in * 2
        yield Case(f"{name}_linear", model, f"rows{n}", "read", read, out, flops, make)


def _backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return run


def _tables(batch: int, context: int, device: str, seed: int) -> Tensor:
    """[batch, blocks] int32: every block once, in a shuffled order, as a pool is after some churn."""
    blocks = -(-context // PAGE)
    order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(seed))
    return order.view(batch, blocks).to(device, torch.int32)


def _prefill(model: str, c: ModelConfig, n: int) -> Case:
    H, K, d = c.num_heads, c.num_kv_heads, c.head_dim

    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = _draw(device, dtype, seed)
        q, k, v = draw(n, H, d), draw(n, K, d), draw(n, K, d)
        pool = draw(2, 1, PAGE, K, d)
        whole = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)
        paging = (*pool, torch.zeros(1, 1, dtype=torch.int32, device=device), whole(0, n), whole(0))
        hq, hk, hv = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
        return Inputs(
            lambda: (flash_prefill(q, k, v, *paging, n),),
            lambda: (flash_prefill_reference(*(x.double() for x in (q, k, v, *pool)), *paging[2:]),),
            {
                "flash": _backend(SDPBackend.FLASH_ATTENTION, hq, hk, hv, True),
                "cudnn": _backend(SDPBackend.CUDNN_ATTENTION, hq, hk, hv, True),
            },
        )  # fmt: skip

    read = n * (H + 2 * K) * d * 2 + 12  # and the two bounds, and the history's length
    flops = 4 * H * d * (n * (n + 1) // 2)
    return Case("flash_prefill", model, f"n{n}", "flops", read, n * H * d * 2, flops, make, "flash_prefill")


def _decode(model: str, c: ModelConfig, batch: int, context: int) -> Case:
    H, K, d = c.num_heads, c.num_kv_heads, c.head_dim
    blocks = -(-context // PAGE)

    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = _draw(device, dtype, seed)
        q, pool = draw(batch, H, d), draw(2, batch * blocks, PAGE, K, d)
        table = _tables(batch, context, device, seed)
        lens = torch.full((batch,), context, dtype=torch.int32, device=device)

        def peer(backend: SDPBackend) -> Callable[[], Tensor]:  # its keys lie one after the other, without pages
            k, v = pool.view(2, batch, blocks * PAGE, K, d)[:, :, :context].transpose(2, 3)
            return _backend(backend, q[:, :, None], k, v)

        return Inputs(
            lambda: paged_decode(q, *pool, table, lens, context),
            lambda: paged_decode_reference(q, *pool, table, lens),
            {"flash": peer(SDPBackend.FLASH_ATTENTION), "cudnn": peer(SDPBackend.CUDNN_ATTENTION)},
        )

    read = batch * (context * K * d * 2 * 2 + blocks * 4 + H * d * 2 + 4)
    written = batch * H * (d * 2 + 4)
    flops = 4 * batch * context * H * d
    return Case("paged_decode", model, f"b{batch}t{context}", "read", read, written, flops, make, "paged_decode")
