"""Time of a decode step with plain and with quantised weights, alternating in one run. Lesson 08 builds it.

Quality first: a variant without a quality record that admits it is not timed, and a record whose quality
record has changed or gone is not shown. See roofline/gate.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minillm.bench.common import Options, ceilings, ceilings_after, clock, progress, recorder
from minillm.bench.ladder import TOLERANCE, prepare
from minillm.bench.quality import source_of
from minillm.errors import MinillmError
from minillm.models import hub
from minillm.models.transformer import Transformer
from minillm.roofline import evidence
from minillm.roofline.evidence import seconds
from minillm.roofline.gate import admit, faults_of
from minillm.roofline.record import Recorder

VARIANTS = ("int8", "int4")
CONTEXT = 128  # tokens visible to the step, itself included
CHECKED = 24  # tokens of the check


def run(options: Options) -> dict[str, Any]:
    """Ask the gate, predict, seal, measure, check. Raises MinillmError when no variant is admitted."""
    options.model = options.model or hub.EMBEDDED
    repeats = options.repeats or 15
    source, sha256 = source_of(options)
    kind = "cpu" if options.on_cpu else "cuda"
    admitted, refused = {}, {}
    for variant in VARIANTS:
        try:
            admitted[variant] = admit(variant, sha256, kind)
        except MinillmError as error:
            refused[variant] = str(error)
            options.out(str(error))
    if not admitted:
        raise MinillmError("; ".join(refused.values()))

    device = ceilings(options)
    book = recorder(
        options, device, weights="checkpoint", repeats=repeats, weights_sha256=sha256, quality=admitted,
        refused=refused, context=CONTEXT, order="alternating, turned by one with each repeat",
    )  # fmt: skip
    names: dict[str, str | None] = {options.dtype: None} | {v: v for v in admitted}
    for name, scheme in names.items():
        book.predict(f"decode.{name}", source.config, options.dtype, rows=[(1, CONTEXT - 1)], weights_as=scheme)
    options.out(f"predictions sealed: sha256 {book.seal()}")

    models = {name: source.transformer(scheme) for name, scheme in names.items()}
    steps: dict[str, Callable[[], torch.Tensor]] = {
        name: prepare(model, [(1, CONTEXT - 1)], True, options.seed) for name, model in models.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    order = list(steps)
    for i in progress(range(repeats), "quant"):
        for name in order[i % len(order) :] + order[: i % len(order)]:
            samples[name].append(clock(steps[name], options.device))
    for name in steps:
        book.measured(f"decode.{name}", samples[name])
        book.derive(f"decode.{name}.share", "share", [f"decode.{name}"])
        book.derive(f"decode.{name}.residual", "residual", [f"decode.{name}"])
    for name in admitted:
        book.derive(f"speedup.{name}", "ratio", [f"decode.{options.dtype}", f"decode.{name}"])
    check(book, models, options)
    return book.finish(ceilings_after(options))


def check(book: Recorder, models: dict[str, Transformer], options: Options) -> None:
    """The step that was timed gives the logits of its own model computed at once: other kernels, the same weights."""
    limit = TOLERANCE[options.dtype]
    for name, model in models.items():
        at_once, stepped = (prepare(model, [work], cached, options.seed)().float() for work, cached in (
            ((CHECKED, 0), False), ((1, CHECKED - 1), True),
        ))  # fmt: skip
        error = ((at_once - stepped).abs().max() / at_once.abs().max()).item()
        detail = f"largest difference {error:.2e} of the largest logit, allowed {limit:.0e}"
        book.check(f"{name}: a step gives the logits of the whole", error <= limit, detail)


def show(record: dict[str, Any]) -> str:
    """The record as text. Raises MinillmError when a speed in it has no quality record behind it today."""
    if faults := faults_of(record, evidence.records_dir()):
        raise MinillmError(faults[0].message)
    setup = record["setup"]
    lines = [f"{setup['model']}, {setup['dtype']}, {setup['threads']} threads: one decode step at {setup['context']}"]
    entry = lambda name: record["predictions"][f"decode.{name}"]["prediction"]
    for key in record["predictions"]:
        name, result, predicted = key.removeprefix("decode."), record["results"][key], record["predictions"][key]
        lines.append(
            f"  {name:<10}{seconds(result['median']):>9} (p10 {seconds(result['p10'])}, p90 {seconds(result['p90'])}), "
            f"predicted {seconds(predicted['prediction']['expected'])}, "
            f"{predicted['prediction']['compulsory_bytes'] / 1e6:.0f} MB"
        )
    for name, quality in setup["quality"].items():
        ratio, plain = record["derived"][f"speedup.{name}"], entry(setup["dtype"])
        lines.append(
            f"  {name}: {ratio['median']:.2f} times as fast (p10 {ratio['p10']:.2f}, p90 {ratio['p90']:.2f}); "
            f"by bytes {plain['compulsory_bytes'] / entry(name)['compulsory_bytes']:.2f}, "
            f"by the roofline {plain['expected'] / entry(name)['expected']:.2f}; "
            f"perplexity {quality['ratio']:.4f} times, gate {quality['gate']}"
        )
    lines += [f"  {reason}" for reason in setup["refused"].values()]
    lines += [f"  check  {'ok  ' if c['passed'] else 'FAIL'}  {c['name']}: {c['detail']}" for c in record["checks"]]
    return "\n".join(lines)
