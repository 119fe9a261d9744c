"""What quantising does to the answers, before anyone asks what it does to the speed. Lesson 08 builds it (ROWS B11).

Each variant reads a text that ships with the project, in sliding windows, beside the plain model: perplexity, the share
of tokens at which the two would choose the same, KL divergence, largest difference of a logit. Then both write on from
some prompts, token by token through the cache, until they part.

A variant is a name, the scheme of its weights, and a function that makes a `Side`. A quantised KV cache is one more
entry of VARIANTS whose side attends through another cache.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from minillm.attention.causal import NoCacheAttention
from minillm.attention.protocol import Batch, Row
from minillm.bench.common import Options, progress, recorder
from minillm.config import ModelConfig
from minillm.models import hub
from minillm.models.linear import Linear
from minillm.models.transformer import Transformer
from minillm.models.weights import Weights, load_weights
from minillm.quant import LINEARS, ROUNDING, QuantLinear, quantize_model, scheme_of
from minillm.request import Request, SamplingParams
from minillm.roofline.device import this_machine
from minillm.roofline.record import Recorder
from minillm.runner import CachedRunner

TEXT = Path(__file__).with_name("quality_text.txt")  # written for this project, CC0
WINDOW, STRIDE = 512, 256  # a token is judged with at least WINDOW - STRIDE tokens before it, but for the first window
PROMPT, NEW = 32, 32  # tokens of a prompt, and tokens written on from it
PROMPTS = 8


@dataclass(frozen=True)
class Source:
    """A model that can be loaded again and again: the variants must start from the same weights."""

    config: ModelConfig
    load: Callable[[], Weights]
    device: str

    def transformer(self, scheme: str | None = None, head: bool = False) -> Transformer:
        on_cpu = self.device == "cpu"
        model = Transformer(self.config, self.load(), pack=on_cpu and scheme is None)
        return model if scheme is None else quantize_model(model, scheme, head=head)


class Side(Protocol):
    def logits(self, tokens: list[int], begin: int = 0) -> Tensor:
        """Scores after each token of a sequence, from token `begin` on: [T - begin, V] fp32."""

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens after the prompt, one step at a time, through the variant's own decode path."""


class EngineSide:
    """A transformer with a contiguous cache."""

    def __init__(self, model: Transformer):
        self.model = model

    def logits(self, tokens: list[int], begin: int = 0) -> Tensor:
        batch = Batch.build([Row(0, 0, len(tokens))], tokens, self.model.device)
        return self.model.logits(self.model.forward(batch, NoCacheAttention())[begin:]).float()

    def generate(self, prompt: list[int], count: int) -> list[int]:
        greedy = SamplingParams(temperature=0.0, max_tokens=count)
        request = Request("quality", list(prompt), greedy, seed=0, max_tokens=count)
        runner = CachedRunner(self.model)
        runner.start([request])
        written: list[int] = []
        for _ in range(count):
            written.append(int(runner.forward([request])[0].argmax()))
            request.output_token_ids.append(written[-1])
        return written


@dataclass(frozen=True)
class Variant:
    """name: a key of the record; scheme: of its weights; head: whether the head is quantised too."""

    name: str
    scheme: str
    make: Callable[[Source, Variant], Side]
    head: bool = False


def weight_only(source: Source, variant: Variant) -> EngineSide:
    return EngineSide(source.transformer(variant.scheme, variant.head))


VARIANTS = (
    Variant("int8", "int8", weight_only),
    Variant("int8+head", "int8", weight_only, head=True),
    Variant("int4", "int4", weight_only),
    Variant("int4-g64", "int4-g64", weight_only),
    Variant("int4+head", "int4", weight_only, head=True),
)


def fitting(config: ModelConfig) -> list[Variant]:
    """The variants whose groups divide every matrix of the model."""
    widths = {config.hidden_size, config.q_size, config.intermediate_size}
    return [v for v in VARIANTS if all(w % (scheme_of(v.scheme).group or 1) == 0 for w in widths)]


def source_of(options: Options) -> tuple[Source, str]:
    """The model asked for, and the SHA-256 of its weights in this dtype."""
    folder = hub.resolve(options.model or hub.EMBEDDED)
    config = ModelConfig.from_folder(folder)
    source = Source(config, lambda: load_weights(folder, config, options.torch_dtype, options.device), options.device)
    return source, fingerprint(source.load())


def fingerprint(weights: Weights) -> str:
    """SHA-256 over the bytes of every tensor, in the order of `Weights.tensors`."""
    digest = hashlib.sha256()
    for tensor in weights.tensors():
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokens_of(options: Options) -> list[int]:
    from minillm.models.tokenizer import Tokenizer

    return Tokenizer(hub.resolve(options.model or hub.EMBEDDED)).encode(TEXT.read_text(encoding="utf-8"))


def windows(count: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first judged) of windows over `count` tokens, so that each but the first is judged once."""
    judged = 1  # nothing comes before token 0, so nothing can foretell it
    for begin in range(0, max(1, count - length + stride), stride):
        end = min(begin + length, count)
        if judged < end:
            yield begin, end, judged
        judged = max(judged, end)


def run(options: Options) -> dict[str, Any]:
    """Predict bytes, weight error and the bound of the perplexity, seal, measure, check. Returns the record."""
    options.model = options.model or hub.EMBEDDED
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = this_machine(options.device)  # no time is measured, so remembered ceilings do
    source, sha256 = source_of(options)
    tokens = tokens_of(options)
    cut, variants = list(windows(len(tokens), WINDOW, STRIDE)), fitting(source.config)
    book = recorder(
        options, device, weights="checkpoint", weights_sha256=sha256, rounding=ROUNDING, window=WINDOW, stride=STRIDE,
        text_sha256=hashlib.sha256(TEXT.read_bytes()).hexdigest(), tokens=len(tokens), prompt=PROMPT, new=NEW,
        variants=[v.name for v in variants], timer="none: nothing here is a time",
    )  # fmt: skip
    for v in variants:
        shape = {"model": asdict(source.config), "dtype": options.dtype, "scheme": v.scheme, "head": v.head}
        for quantity in ("weight_bytes", "weight_error", "perplexity_ratio"):
            book.expect(f"{quantity}.{v.name}", quantity, **shape)
    options.out(f"predictions sealed: sha256 {book.seal()}")

    base = EngineSide(source.transformer())
    plain = [base.logits(tokens[a:b], first - 1 - a)[:-1].to(options.torch_dtype) for a, b, first in cut]
    texts = [tokens[i : i + PROMPT] for i in range(0, len(tokens) - PROMPT, max(1, len(tokens) // PROMPTS))]
    written = [base.generate(prompt, NEW) for prompt in texts]
    judged = sum(b - first for _, b, first in cut)
    book.check("each token but the first is judged once", judged == len(tokens) - 1, f"{judged} of {len(tokens)}")
    losses = [_losses(x.float(), tokens[first:b]) for x, (_, b, first) in zip(plain, cut, strict=True)]
    _perplexities(book, options.dtype, losses)
    for v in variants:
        _measure(book, v, source, tokens, cut, plain, texts, written, options)
    return book.finish()


def _measure(
    book: Recorder, v: Variant, source: Source, tokens: list[int], cut: list[tuple[int, int, int]],
    plain: list[Tensor], texts: list[list[int]], written: list[list[int]], options: Options,
) -> None:  # fmt: skip
    side = v.make(source, v)
    size, error, steps = weights_against(side.model, source.load())  # type: ignore[attr-defined]
    book.measured(f"weight_bytes.{v.name}", [size], unit="bytes")
    tiny = 1e-12  # a record's results are above 0
    book.measured(f"weight_error.{v.name}", [max(error, tiny)], unit="1")
    book.check(f"{v.name}: every weight is within half a step", steps <= 0.5001, f"at most {steps:.4f} steps off")
    losses, same, divergence, apart = [], [], [], []
    for x, (a, b, first) in progress(list(zip(plain, cut, strict=True)), v.name):
        p, q = x.float(), side.logits(tokens[a:b], first - 1 - a)[:-1]
        losses.append(_losses(q, tokens[first:b]))
        same.append((p.argmax(-1) == q.argmax(-1)).double().mean().item())
        p_log, q_log = p.log_softmax(-1), q.log_softmax(-1)
        divergence.append((p_log.exp() * (p_log - q_log)).sum(-1).double().mean().item())
        apart.append((p - q).abs().max().item())
    _perplexities(book, v.name, losses)
    book.derive(f"perplexity_ratio.{v.name}", "ratio", [f"perplexity.{v.name}", f"perplexity.{options.dtype}"])
    names = [f"window_perplexity.{name}" for name in (v.name, options.dtype)]
    book.derive(f"window_ratio.{v.name}", "ratio", names)
    book.measured(f"agreement.{v.name}", [max(s, tiny) for s in same], unit="1", note="greedy tokens equal, by window")
    book.measured(f"kl.{v.name}", [max(d, tiny) for d in divergence], unit="nats a token", note="plain || quantised")
    book.measured(f"logit_difference.{v.name}", [max(d, tiny) for d in apart], unit="1", note="largest, by window")
    parted = [_first_difference(mine, side.generate(t, NEW)) for t, mine in zip(texts, written, strict=True)]
    note = f"the first written token that differs, counted from 1; {NEW + 1}: none does"
    book.measured(f"first_difference.{v.name}", parted, unit="token", note=note)


def _losses(logits: Tensor, targets: list[int]) -> Tensor:
    """Cross-entropy of each token, nats, float64 [len(targets)]."""
    answer = torch.tensor(targets, device=logits.device)
    return torch.nn.functional.cross_entropy(logits, answer, reduction="none").double().cpu()


def _perplexities(book: Recorder, name: str, losses: list[Tensor]) -> None:
    book.measured(f"perplexity.{name}", [math.exp(torch.cat(losses).mean().item())], unit="1", note="of all tokens")
    book.measured(f"window_perplexity.{name}", [math.exp(x.mean().item()) for x in losses], unit="1", note="by window")


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True), 1) if x != y), len(a) + 1)


def weights_against(model: Transformer, plain: Weights) -> tuple[int, float, float]:
    """(bytes of the quantised linears, relative error of their weights, largest error in steps)."""
    size, wrong, energy, worst = 0, 0.0, 0.0, 0.0
    pairs: list[tuple[Linear, Tensor]] = [(model.lm_head, plain.lm_head)]
    for layer, weights in zip(model.layers, plain.layers, strict=True):
        pairs += [(getattr(layer, name), getattr(weights, name)) for name in LINEARS]
    for linear, weight in pairs:
        if isinstance(linear, QuantLinear):
            off = linear.dequantize() - weight.float()
            size += linear.nbytes
            wrong += off.double().square().sum().item()
            energy += weight.double().square().sum().item()
            worst = max(worst, (off.abs() / linear.steps()).max().item())
    return size, math.sqrt(wrong / energy), worst


def show(record: dict[str, Any]) -> str:
    """The record as text: one line a variant, and whether it passes its gate."""
    setup, results = record["setup"], record["results"]
    base = results[f"perplexity.{setup['dtype']}"]["median"]
    lines = [
        f"{setup['model']}, {setup['dtype']}: perplexity {base:.3f} on {setup['tokens']} tokens, windows of "
        f"{setup['window']}",
        f"  {'variant':<10}{'bytes':>11}{'weight error':>22}{'perplexity':>12}{'gate':>7}{'':>8}{'agree':>8}{'KL':>10}"
        f"{'logits':>8}  parts at",
    ]
    for name in setup["variants"]:
        ratio, gate = record["derived"][f"perplexity_ratio.{name}"]["median"], _gate(record, name)
        parts, error = results[f"first_difference.{name}"], results[f"weight_error.{name}"]["median"]
        expected = record["predictions"][f"weight_error.{name}"]["prediction"]["expected"]
        lines.append(
            f"  {name:<10}{results[f'weight_bytes.{name}']['median'] / 1e6:>8.1f} MB"
            f"{error:>9.4f} (pred. {expected:.4f})"
            f"{ratio:>12.4f}{gate:>7.2f}{'  passes' if ratio <= gate else '   FAILS'}"
            f"{results[f'agreement.{name}']['median']:>8.1%}{results[f'kl.{name}']['median']:>10.5f}"
            f"{results[f'logit_difference.{name}']['max']:>8.2f}  token {parts['median']:g} of {setup['new']}"
        )
    lines += _already_coarse(record)
    lines += [f"  check  {'ok  ' if c['passed'] else 'FAIL'}  {c['name']}: {c['detail']}" for c in record["checks"]]
    return "\n".join(lines)


def _already_coarse(record: dict[str, Any]) -> list[str]:
    """Weights that lie on a grid like the codes' lose nothing to it. That passes a gate, and must be said."""
    lines = []
    for name in record["setup"]["variants"]:
        error = record["results"][f"weight_error.{name}"]["median"]
        expected = record["predictions"][f"weight_error.{name}"]["prediction"]["expected"]
        if error < expected / 2:
            lines.append(
                f"  note: {name} hardly changes the weights (by {error:.4f}, rounding would by {expected:.4f}): the "
                "checkpoint was on such a grid already, so this says nothing of other checkpoints"
            )
    return lines


def _gate(record: dict[str, Any], name: str) -> float:
    return record["predictions"][f"perplexity_ratio.{name}"]["prediction"]["upper"]
