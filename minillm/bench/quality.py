"""What quantising does to the answers, before anyone asks what it does to the speed. Lesson 08 builds it.

Each variant reads a text that ships with the project, in sliding windows, beside the plain model: perplexity, the share
of tokens at which the two would choose the same, KL divergence, largest difference of a logit. Then both write on from
some prompts, token by token through the cache, until they part.

A variant quantises the weights or the KV cache; sides.py has the two kinds of models. Gates are in
roofline/quantities.py, chosen before measuring and sealed with the predictions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.bench.common import Options, progress, recorder
from minillm.bench.ladder import TOLERANCE
from minillm.bench.sides import EngineSide, PagedSide, Side, Source
from minillm.cache.pool import KV_DTYPES, SMALLEST_AMAX, KVPool, dequantize_kv, quantize_kv
from minillm.config import ModelConfig
from minillm.models import hub
from minillm.models.linear import Linear
from minillm.models.transformer import Transformer
from minillm.models.weights import Weights, load_weights
from minillm.quant import LINEARS, ROUNDING, QuantLinear, scheme_of
from minillm.roofline.device import this_machine
from minillm.roofline.record import Recorder

TEXT = Path(__file__).with_name("quality_text.txt")  # written for this project, CC0
WINDOW, STRIDE = 512, 256  # a token is judged with at least WINDOW - STRIDE tokens before it, but for the first window
PROMPT, NEW = 32, 32  # tokens of a prompt, and tokens written on from it
PROMPTS = 8


@dataclass(frozen=True)
class Variant:
    """name: a key of the record. scheme: of the weights (head: of the head too); or kv: of the cache."""

    name: str
    scheme: str | None = None
    head: bool = False
    kv: str | None = None

    @property
    def judged(self) -> tuple[str, ...]:
        """What is predicted of it."""
        return (*(("weight_bytes", "weight_error") if self.scheme else ("kv_bytes", "kv_error")), "perplexity_ratio")

    @property
    def shape(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "head": self.head} if self.scheme else {"kv": self.kv}

    def make(self, source: Source) -> Side:
        if self.kv is None:
            return EngineSide(source.transformer(self.scheme, self.head))
        return PagedSide(source.transformer(), self.kv, max(WINDOW, PROMPT + NEW))


VARIANTS = (
    Variant("int8", "int8"),
    Variant("int8+head", "int8", head=True),
    Variant("int4", "int4"),
    Variant("int4-g64", "int4-g64"),
    Variant("int4+head", "int4", head=True),
    Variant("kv-int8", kv="int8"),
    Variant("kv-fp8", kv="fp8"),
)


def fitting(config: ModelConfig) -> list[Variant]:
    """The variants whose groups divide every matrix of the model."""
    widths = {config.hidden_size, config.q_size, config.intermediate_size}
    fits = lambda v: v.scheme is None or all(w % (scheme_of(v.scheme).group or 1) == 0 for w in widths)
    return [v for v in VARIANTS if fits(v)]


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
        for quantity in v.judged:
            book.expect(f"{quantity}.{v.name}", quantity, model=asdict(source.config), dtype=options.dtype, **v.shape)
    book.expect(f"kv_bytes.{options.dtype}", "kv_bytes", model=asdict(source.config), dtype=options.dtype, kv="auto")
    options.out(f"predictions sealed: sha256 {book.seal()}")

    base = EngineSide(source.transformer())
    plain = [base.logits(tokens[a:b], first - 1 - a)[:-1].to(options.torch_dtype) for a, b, first in cut]
    texts = [tokens[i : i + PROMPT] for i in range(0, len(tokens) - PROMPT, max(1, len(tokens) // PROMPTS))]
    written = [base.generate(prompt, NEW) for prompt in texts]
    judged = sum(b - first for _, b, first in cut)
    book.check("each token but the first is judged once", judged == len(tokens) - 1, f"{judged} of {len(tokens)}")
    losses = [_losses(x.float(), tokens[first:b]) for x, (_, b, first) in zip(plain, cut, strict=True)]
    _perplexities(book, options.dtype, losses)
    paged = PagedSide(base.model, "auto", max(WINDOW, PROMPT + NEW))
    (a, b, first), limit = cut[0], TOLERANCE[options.dtype]
    off = ((paged.logits(tokens[a:b], first - 1 - a)[:-1] - plain[0].float()).abs().max() / plain[0].abs().max()).item()
    detail = f"largest difference {off:.1e} of the largest logit, allowed {limit:.0e}"
    book.check("a paged cache that is not quantised changes nothing", off <= limit, detail)
    book.measured(f"kv_bytes.{options.dtype}", [paged.token_bytes], unit="bytes a token")
    for v in variants:
        side = v.make(source)
        _stored(book, v, side, source, paged.pool, min(b - a, WINDOW))
        _measure(book, v, side, tokens, cut, plain, texts, written, options)
    return book.finish()


def _stored(book: Recorder, v: Variant, side: Side, source: Source, plain: KVPool, length: int) -> None:
    """Bytes of what was quantised, and how far it is from the plain: weights, or keys and values of `length` tokens."""
    tiny = 1e-12  # a record's results are above 0
    if isinstance(side, PagedSide):
        error, steps = kv_against(plain, str(v.kv), length)
        book.measured(f"kv_bytes.{v.name}", [side.token_bytes], unit="bytes a token")
        book.measured(f"kv_error.{v.name}", [max(error, tiny)], unit="1")
        book.check(f"{v.name}: every entry is within half a step", steps <= 0.5001, f"at most {steps:.4f} steps off")
        return
    size, error, steps = weights_against(side.model, source.load())
    book.measured(f"weight_bytes.{v.name}", [size], unit="bytes")
    book.measured(f"weight_error.{v.name}", [max(error, tiny)], unit="1")
    book.check(f"{v.name}: every weight is within half a step", steps <= 0.5001, f"at most {steps:.4f} steps off")


def _measure(
    book: Recorder, v: Variant, side: Side, tokens: list[int], cut: list[tuple[int, int, int]],
    plain: list[Tensor], texts: list[list[int]], written: list[list[int]], options: Options,
) -> None:  # fmt: skip
    tiny = 1e-12
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


def kv_against(plain: KVPool, kv_dtype: str, length: int) -> tuple[float, float]:
    """(relative error, largest error in steps) of storing the first `length` tokens of a plain pool in eight bits.

    A step of int8 is the head's scale. One of e4m3 is 2^(e-3) scales in the octave of 2^e, and 2^-9 below 2^-6.
    """
    wrong, energy, worst = 0.0, 0.0, 0.0
    for pool in (plain.k, plain.v):
        x = pool[:, 1:].flatten(1, 2)[:, :length].float()  # block 0 is padding
        stored, scale = quantize_kv(x, KV_DTYPES[kv_dtype])
        off = (dequantize_kv(stored, scale) - x).double()
        codes = (x / scale.unsqueeze(-1).clamp_min(SMALLEST_AMAX)).double()
        step = torch.ones_like(codes) if kv_dtype == "int8" else codes.abs().clamp_min(2**-6).log2().floor().exp2() / 8
        wrong, energy = wrong + off.square().sum().item(), energy + x.double().square().sum().item()
        worst = max(worst, (off.abs() / (step * scale.unsqueeze(-1))).max().item())
    return math.sqrt(wrong / energy), worst


def show(record: dict[str, Any]) -> str:
    """The record as text: one line a variant, and whether it passes its gate."""
    setup, results = record["setup"], record["results"]
    base = results[f"perplexity.{setup['dtype']}"]["median"]
    lines = [
        f"{setup['model']}, {setup['dtype']}: perplexity {base:.3f} on {setup['tokens']} tokens, windows of "
        f"{setup['window']}",
        f"  {'variant':<10}{'bytes':>11}{'error':>22}{'perplexity':>12}{'gate':>7}{'':>8}{'agree':>8}{'KL':>10}"
        f"{'logits':>8}  parts at",
    ]
    for name in setup["variants"]:
        ratio, gate = record["derived"][f"perplexity_ratio.{name}"]["median"], _gate(record, name)
        parts = results[f"first_difference.{name}"]
        error, expected = _error(record, name)
        if (kv := f"kv_bytes.{name}") in results:
            size = f"{results[kv]['median'] / 1e3:>7.2f} kB/t"
        else:
            size = f"{results[f'weight_bytes.{name}']['median'] / 1e6:>8.1f} MB  "
        lines.append(
            f"  {name:<10}{size}"
            f"{error:>8.4f} (pred. {expected:.4f})"
            f"{ratio:>12.4f}{gate:>7.2f}{'  passes' if ratio <= gate else '   FAILS'}"
            f"{results[f'agreement.{name}']['median']:>8.1%}{results[f'kl.{name}']['median']:>10.5f}"
            f"{results[f'logit_difference.{name}']['max']:>8.2f}  token {parts['median']:g} of {setup['new']}"
        )
    plain = results.get(f"kv_bytes.{setup['dtype']}")
    if plain is not None:
        lines.append(f"  kB/t: of keys and values a token; {plain['median'] / 1e3:.2f} in {setup['dtype']}")
    lines += _already_coarse(record)
    lines += [f"  check  {'ok  ' if c['passed'] else 'FAIL'}  {c['name']}: {c['detail']}" for c in record["checks"]]
    return "\n".join(lines)


def _error(record: dict[str, Any], name: str) -> tuple[float, float]:
    """Measured and predicted error of what a variant quantises."""
    key = next(k for k in (f"weight_error.{name}", f"kv_error.{name}") if k in record["results"])
    return record["results"][key]["median"], record["predictions"][key]["prediction"]["expected"]


def _already_coarse(record: dict[str, Any]) -> list[str]:
    """Weights that lie on a grid like the codes' lose nothing to it. That passes a gate, and must be said."""
    lines = []
    for name in record["setup"]["variants"]:
        error, expected = _error(record, name)
        if error < expected / 2 and f"weight_error.{name}" in record["results"]:
            lines.append(
                f"  note: {name} hardly changes the weights (by {error:.4f}, rounding would by {expected:.4f}): the "
                "checkpoint was on such a grid already, so this says nothing of other checkpoints"
            )
    return lines


def _gate(record: dict[str, Any], name: str) -> float:
    return record["predictions"][f"perplexity_ratio.{name}"]["prediction"]["upper"]
