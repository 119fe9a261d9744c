"""What every bench step needs: options, a model on its device, seeded tokens, a clock, progress, the ceilings.

Imports torch only, so that the ladder runs on a bare GPU machine.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from minillm.config import ModelConfig, dtype_name
from minillm.device import pick_device, pick_dtype
from minillm.errors import MinillmError
from minillm.models import hub
from minillm.models.presets import PRESETS
from minillm.models.transformer import Transformer
from minillm.models.weights import load_weights, random_weights
from minillm.roofline import measure
from minillm.roofline.device import Device, this_machine
from minillm.roofline.record import Recorder

T = TypeVar("T")


@dataclass
class Options:
    """What a bench step may be asked. None means the step's own default."""

    step: str = "ladder"
    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    repeats: int | None = None
    threads: int | None = None
    seed: int = 0
    peer: str | None = None
    prompt: int = 128
    new: int = 64
    requests: int = 32
    contexts: tuple[int, ...] | None = None
    workloads: tuple[str, ...] | None = None
    gguf: str | None = None
    cached_ceilings: bool = False  # for a quick look: the record then names ceilings of another run
    command: str = "python3 -m minillm.bench"
    out: Callable[[str], None] = field(default=lambda line: print(line, file=sys.stderr, flush=True))

    def __post_init__(self) -> None:
        for name in ("repeats", "threads", "prompt", "new", "requests"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 1_000_000:
                raise MinillmError(f"--{name} must be a whole number from 1 to 1000000, got {value}")
        if self.contexts is not None and (not self.contexts or not all(1 <= c <= 10_000_000 for c in self.contexts)):
            raise MinillmError(f"--contexts must be whole numbers of at least 1, got {self.contexts}")
        self.device = str(pick_device(self.device))
        asked = self.dtype if self.dtype == "auto" else dtype_name(self.dtype)
        self.dtype = dtype_name(pick_dtype(asked, "bfloat16", torch.device(self.device)))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


def ceilings(options: Options) -> Device:
    """The ceilings of this run: measured now, so that prediction and result saw the same machine."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.out("measuring the ceilings of this machine")
    return this_machine(options.device, remeasure=not options.cached_ceilings)


def ceilings_after(options: Options) -> dict[str, float]:
    """Bandwidths once more, in bytes/s: had the machine become faster meanwhile, the roof moves with it."""
    return {name: max(samples) for name, samples in measure.bandwidths(options.device, repeats=3).items()}


def read_bandwidth(options: Options, megabytes: int = 512) -> Callable[[], float]:
    """A probe to run beside other measurements: bytes/s of streaming reads now, the best of five passes."""
    data = torch.ones(megabytes * (1 << 20) // 4, device=options.device)

    def probe() -> float:
        return data.nbytes / min(measure.seconds(lambda: torch.sum(data), options.device, 5, warmup=0))

    return probe


def recorder(options: Options, device: Device, **setup: Any) -> Recorder:
    common = {
        "model": options.model, "dtype": options.dtype, "threads": torch.get_num_threads(), "seed": options.seed,
        "timer": "perf_counter" if options.on_cpu else "perf_counter between two device synchronisations",
        "cache": "warm code, weights streamed from memory", "mode": "eager",
    }  # fmt: skip
    return Recorder(options.step, device, command=options.command, setup=common | setup)


def load_model(options: Options, max_len: int) -> tuple[Transformer, str]:
    """A transformer on its device, and where its weights are from.

    A preset gets random weights, made on the device, except the embedded model once it is fetched.
    """
    name = options.model or ""
    if name in PRESETS and not (name == hub.EMBEDDED and hub.is_fetched()):
        config, source = PRESETS[name], "random"
        weights = random_weights(config, options.torch_dtype, options.device, options.seed)
    else:
        folder = hub.resolve(name)
        config, source = ModelConfig.from_folder(folder), "checkpoint"
        weights = load_weights(folder, config, options.torch_dtype, options.device)
    if max_len > config.max_position_embeddings:
        raise MinillmError(f"{name} has {config.max_position_embeddings} positions, this bench needs {max_len}")
    return Transformer(config, weights, max_len, pack=options.on_cpu), source


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    """Token ids clear of the special ones that sit at the ends of most vocabularies."""
    low, high = (100, vocab_size - 300) if vocab_size > 1000 else (0, vocab_size)
    return [rng.randrange(low, high) for _ in range(count)]


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def clock(run: Callable[[], Any], device: str) -> float:
    """Seconds of one call, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def progress(items: Iterable[T], label: str) -> Iterator[T]:
    """A progress bar on stderr where tqdm is installed; the items alone where not."""
    try:
        from tqdm import tqdm
    except ImportError:
        return iter(items)
    return iter(tqdm(items, desc=label, leave=False, file=sys.stderr))
