"""More than one device: what ranks say to each other, what a split of the model costs and gives. Lessons 14 and 15.

On a CPU        all-reduces fitted and judged on other sizes (collectives.py); the bubble of paced runs (bubble.py); the
                model on N ranks beside one process (tensor.py); a prompt's KV handed to another process (transfer.py);
                prefill and decode in two processes (split.py)
On one GPU      the shards of a layer, with the all-reduces added by the model (shards.py); KV handed over, and two
                engines that share the card as a split
On several      all-reduces over NCCL and a model on N cards besides (cards.py)

Each part predicts what it will measure; all predictions are sealed before any of it is measured.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

import torch

from minillm.bench.bubble import Bubble
from minillm.bench.cards import Cards
from minillm.bench.collectives import Collectives
from minillm.bench.common import Options, ceilings, ceilings_after, recorder
from minillm.bench.main import _find_kernels
from minillm.bench.shards import Shards
from minillm.bench.split import Split
from minillm.bench.tensor import TensorParallel
from minillm.bench.transfer import KVTransfer
from minillm.models import hub
from minillm.models.presets import preset
from minillm.parallel.shard import why_not


def model_of(memory_bytes: float) -> str:
    """The largest of these of which two, with their KV, fit on a card beside the shards of a 70 B layer."""
    return next((name for least, name in ((75e9, "llama-3.1-8b"), (22e9, "llama-3.2-1b")) if memory_bytes >= least),
                "qwen3-0.6b")  # fmt: skip


class Part(Protocol):
    """A part of this bench. Made: it may measure what its predictions rest on, which goes into `setup`."""

    setup: dict[str, Any]

    def expect(self, book: Any) -> None: ...

    def measure(self, book: Any) -> None: ...

    def lines(self, record: dict[str, Any]) -> list[str]: ...


def run(options: Options) -> dict[str, Any]:
    """Make all parts, predict, seal, measure, check. Returns the record."""
    device = ceilings(options)
    options.model = options.model or (hub.EMBEDDED if options.on_cpu else model_of(device.memory_bytes))
    with ExitStack() as stack:
        parts = on_cpu(options, stack) if options.on_cpu else on_cuda(options, device, stack)
        setup = {name: value for part in parts for name, value in part.setup.items()}
        book = recorder(options, device, repeats=options.repeats or "by part", parts=names(parts), **setup)
        for part in parts:
            part.expect(book)
        options.out(f"predictions sealed: sha256 {book.seal()}")
        for part in parts:
            part.measure(book)
    return book.finish(ceilings_after(options))


def names(parts: list[Any]) -> list[str]:
    return [type(part).__name__ for part in parts]


def on_cpu(options: Options, stack: ExitStack) -> list[Any]:
    said = Collectives(options)
    ranks = TensorParallel(options, said.link_of)
    stack.callback(ranks.close)
    moved = KVTransfer(options, ranks.config)
    stack.callback(moved.close)
    split = Split(options, hub.resolve(options.model or hub.EMBEDDED), moved.rates)
    stack.callback(split.close)
    return [said, Bubble(options), ranks, moved, split]


def on_cuda(options: Options, device: Any, stack: ExitStack) -> list[Any]:
    _find_kernels()
    count, config = torch.cuda.device_count(), preset(options.model or "")
    moved = KVTransfer(options, config)
    stack.callback(moved.close)
    split = Split(options, config, moved.rates)
    stack.callback(split.close)
    parts: list[Any] = [Shards(options, device), moved, split]
    if sizes := tuple(n for n in (2, 4, 8) if n <= count and why_not(config, n) is None):
        said = Collectives(options, ranks=tuple(dict.fromkeys((2, sizes[-1]))))
        parts += [said, Cards(options, said.link, device, config, sizes)]
    return parts


SHOWN = {part.__name__: part for part in (Collectives, Bubble, TensorParallel, KVTransfer, Split, Shards, Cards)}


def show(record: dict[str, Any]) -> str:
    """The record as text."""
    setup = record["setup"]
    lines = [f"{setup['model']}, {setup['dtype']}, {record['device']['name']}, {setup['threads']} threads"]
    for name in setup["parts"]:
        lines += ["", *SHOWN[name].lines(record)]
    lines.append("")
    lines += [f"  check  {'ok  ' if c['passed'] else 'FAIL'}  {c['name']}: {c['detail']}" for c in record["checks"]]
    return "\n".join(lines)
