"""What one rank of a tensor-parallel layer computes, on one card: the four products of a layer, cut for 1, 2, 4, 8.

One card shows how much faster a shard is than the whole; what the ranks say to each other is added by the cost model
and marked as such. Products of a shard are small, so they are replayed as a CUDA graph: an engine does the same.
Attention, norms and head are left out. Weights rotate through more bytes than the last cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minillm.bench.common import Options, progress
from minillm.config import ModelConfig
from minillm.device import on
from minillm.models.presets import preset
from minillm.parallel.shard import local_config, why_not
from minillm.roofline import measure
from minillm.roofline.comm import LINKS, Link
from minillm.roofline.cost import Op, element_size
from minillm.roofline.evidence import seconds

MODELS = {"cuda": ("llama-3.1-8b", "llama-3.1-70b"), "cpu": ("smollm2-135m",)}
SIZES = {"cuda": (1, 2, 4, 8), "cpu": (1, 3)}
ROWS = {"cuda": (1, 32, 256, 2048), "cpu": (1, 64)}
STREAM_BYTES = {"cuda": 2 << 30, "cpu": 1 << 27}
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.01}  # of the largest value: sums in another order
Product = tuple[int, int]  # inputs, outputs


def products(config: ModelConfig) -> list[Product]:
    """q/k/v, o, gate/up, down of one layer."""
    c = config
    return [(c.hidden_size, c.q_size + 2 * c.kv_size), (c.q_size, c.hidden_size),
            (c.hidden_size, 2 * c.intermediate_size), (c.intermediate_size, c.hidden_size)]  # fmt: skip


def layer(config: ModelConfig, rows: int, dtype: str, calls: int) -> Op:
    """The four products as one operator; `calls` is what launching them costs."""
    shapes, size = products(config), element_size(dtype)
    return Op(
        "layer", "linear", flops=2 * rows * sum(i * o for i, o in shapes), weights=size * sum(i * o for i, o in shapes),
        activations_read=size * rows * sum(i for i, _ in shapes), calls=calls, rows=rows,
        activations_written=size * rows * sum(o for _, o in shapes),
    )  # fmt: skip


def link_of(name: str) -> tuple[str, Link]:
    """What joins cards of this name, by datasheet (the SXM form): key of comm.LINKS, and the link."""
    for part, key in (("H100", "nvlink4"), ("H200", "nvlink4"), ("A100", "nvlink3"), ("B200", "nvlink5")):
        if part in name:
            return key, LINKS[key]
    return "pcie4", LINKS["pcie4"]


class Shards:
    def __init__(
        self, options: Options, device: Any, models: tuple[str, ...] | None = None, rows: tuple[int, ...] | None = None
    ):
        kind = "cpu" if options.on_cpu else "cuda"
        self.options, self.kind, self.repeats = options, kind, options.repeats or 15
        self.rows, self.stream = rows or ROWS[kind], STREAM_BYTES[kind]
        self.configs = {name: preset(name) for name in models or MODELS[kind]}
        self.link_key, self.link = link_of(device.name)

    @property
    def setup(self) -> dict[str, Any]:
        replay = "eager" if self.kind == "cpu" else "CUDA graph"
        return {
            "shard_models": list(self.configs), "shard_rows": self.rows, "shard_mode": replay,
            "assumed_link": self.link.to_dict(), "assumed_link_name": self.link_key,
        }  # fmt: skip

    def _cases(self) -> Iterator[tuple[str, int, int]]:
        for name, config in self.configs.items():
            for rows in self.rows:
                for tp in SIZES[self.kind]:
                    if why_not(config, tp) is None:
                        yield name, rows, tp

    def expect(self, book: Any) -> None:
        for name, rows, tp in self._cases():
            op = layer(local_config(self.configs[name], tp), rows, self.options.dtype, 4 if self.kind == "cpu" else 0)
            book.predict_kernel(f"layer.{name}.x{rows}.tp{tp}", op, self.options.dtype)

    @torch.inference_mode()
    def measure(self, book: Any) -> None:
        with on(torch.device(self.options.device)), torch.random.fork_rng(devices=self._devices()):
            torch.manual_seed(self.options.seed)
            for name, config in self.configs.items():
                self._model(book, name, config)
                self._sums(book, name, config)
                if self.kind == "cuda":
                    torch.cuda.empty_cache()

    def _devices(self) -> list[torch.device]:
        return [] if self.kind == "cpu" else [torch.device(self.options.device)]

    def _model(self, book: Any, name: str, config: ModelConfig) -> None:
        sizes = [tp for tp in SIZES[self.kind] if why_not(config, tp) is None]
        weights = {tp: self._weights(local_config(config, tp)) for tp in sizes}
        for rows in progress(self.rows, f"shards of {name}"):
            runs = {tp: self._run(local_config(config, tp), weights[tp], rows) for tp in sizes}
            samples: dict[int, list[float]] = {tp: [] for tp in sizes}
            for i in range(self.repeats + 1):
                for tp in sizes[:: 1 if i % 2 == 0 else -1]:
                    (spent,) = measure.seconds(runs[tp], self.options.device, 1, warmup=0)
                    if i:  # the first round is warm-up
                        samples[tp].append(spent / len(weights[tp]))
            said = {"count": 2, "nbytes": rows * config.hidden_size * element_size(self.options.dtype),
                    "link": self.link.to_dict()}  # fmt: skip
            for tp, taken in samples.items():
                key = f"layer.{name}.x{rows}.tp{tp}"
                book.measured(key, taken)
                book.derive(f"{key}.residual", "residual", [key])
                if tp > 1:
                    whole = f"layer.{name}.x{rows}.tp1"
                    book.derive(f"{key}.alone", "ratio", [whole, key])
                    book.derive(f"{key}.with_collectives", "with_collectives", [key], ranks=tp, **said)
                    book.derive(f"{key}.speedup", "tp_speedup", [whole, key], ranks=tp, **said)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.options.torch_dtype, device=self.options.device).normal_(0.0, 0.02)

    def _weights(self, config: ModelConfig) -> list[list[torch.Tensor]]:
        """Layers of random weights, more bytes than the last cache holds."""
        size = layer(config, 1, self.options.dtype, 0).weights
        return [[self._random(o, i) for i, o in products(config)] for _ in range(max(2, -(-self.stream // size)))]

    def _run(self, config: ModelConfig, weights: list[list[torch.Tensor]], rows: int) -> Callable[[], Any]:
        inputs = [self._random(rows, i) for i, _ in products(config)]

        def work() -> None:
            for matrices in weights:
                for x, w in zip(inputs, matrices, strict=True):
                    F.linear(x, w)

        return work if self.kind == "cpu" else replayed(work)

    def _sums(self, book: Any, name: str, config: ModelConfig) -> None:
        """sum_k x_k W_k = x W, and parts of columns side by side are x W: what the shards compute is the layer."""
        n_in, n_out = products(config)[3]
        x, w = self._random(8, n_in), self._random(n_out, n_in)
        whole, worst = F.linear(x, w).float(), 0.0
        for tp in SIZES[self.kind]:
            if why_not(config, tp) is None:
                parts = zip(x.chunk(tp, 1), w.chunk(tp, 1), strict=True)
                by_rows = sum((F.linear(a, b).float() for a, b in parts), torch.zeros_like(whole))
                by_columns = torch.cat([F.linear(x, part) for part in w.chunk(tp, 0)], 1).float()
                for got in (by_rows, by_columns):
                    worst = max(worst, ((got - whole).abs().max() / whole.abs().max()).item())
        limit = TOLERANCE[self.options.dtype]
        book.check(
            f"{name}: the shards' products are the layer's", worst <= limit, f"off by {worst:.1e} of the largest"
        )

    @staticmethod
    def lines(record: dict[str, Any]) -> list[str]:
        link = record["setup"]["assumed_link_name"]
        lines = [
            f"products of one layer, cut for N ranks; all-reduces by the model over {link}, which no card here has"
        ]
        lines.append("  work                              measured    predicted   times one rank's   with all-reduces")
        for key, p in record["predictions"].items():
            if key.startswith("layer."):
                e, d = record["results"][key], record["derived"]
                alone = f"{d[f'{key}.alone']['median']:.2f}" if f"{key}.alone" in d else ""
                both = f"{d[f'{key}.speedup']['median']:.2f}" if f"{key}.speedup" in d else ""
                expected = seconds(p["prediction"]["expected"])
                what = key.removeprefix("layer.")
                lines.append(f"  {what:<30}{seconds(e['median']):>12}{expected:>13}{alone:>19}{both:>19}".rstrip())
        return lines


def replayed(work: Callable[[], Any]) -> Callable[[], Any]:
    """`work` as a CUDA graph: its launches cost the host one. Run on a side stream first, as torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return partial(_replay, graph, work)


def _replay(graph: torch.cuda.CUDAGraph, work: Callable[[], Any]) -> None:
    """work: the tensors that the graph reads live as long as it does."""
    graph.replay()
