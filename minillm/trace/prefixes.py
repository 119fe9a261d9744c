"""Prompts that begin alike, in the four ways in which they do in practice. Lesson 11 measures what each can save.

Each generator draws token ids; nothing here is text. The same seed gives the same workload on every machine. Arrivals
are a Poisson process, so `time` is in seconds for a `rate` in requests a second, and requests are in order of arrival.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minillm.errors import MinillmError

VOCAB = (1000, 40_000)  # token ids are drawn from here: the ids below are often special ones


@dataclass(frozen=True)
class Arrival:
    """One request of a workload.

    time        seconds after the start
    tokens      the prompt's ids
    new_tokens  length of the answer
    tenant      whose request it is
    group       what it shares its beginning with: a product, a task, a conversation
    """

    time: float
    tokens: tuple[int, ...]
    new_tokens: int
    tenant: str = ""
    group: str = ""


class _Draw:
    """All that a generator draws, from one seed."""

    def __init__(self, seed: int, vocab: tuple[int, int]):
        self.rng, self.vocab = random.Random(seed), vocab

    def text(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(*self.vocab) for _ in range(length))

    def times(self, n: int, rate: float) -> list[float]:
        now, out = 0.0, []
        for _ in range(n):
            now += self.rng.expovariate(rate)
            out.append(now)
        return out


def _sizes(rate: float, **sizes: int) -> None:
    if not rate > 0:
        raise MinillmError(f"rate is a number of requests a second, above 0, got {rate!r}")
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise MinillmError(f"{name} is a whole number, at least 1, got {value!r:.80}")


def system_prompt(
    n: int = 16, *, shared: int = 512, own: int = 32, new_tokens: int = 32, products: int = 1,
    tenants: Sequence[str] = ("",), rate: float = 10.0, seed: int = 0, vocab: tuple[int, int] = VOCAB,
) -> list[Arrival]:  # fmt: skip
    """Every request of a product begins with the product's `shared` tokens and goes on with `own` of its user."""
    _sizes(rate, n=n, shared=shared, own=own, new_tokens=new_tokens, products=products)
    draw = _Draw(seed, vocab)
    prompts = [draw.text(shared) for _ in range(products)]
    out = []
    for now in draw.times(n, rate):
        product, tenant = draw.rng.randrange(products), draw.rng.choice(list(tenants))
        out.append(Arrival(now, prompts[product] + draw.text(own), new_tokens, tenant, f"product {product}"))
    return out


def few_shot(
    n: int = 16, *, tasks: int = 2, instruction: int = 40, examples: int = 4, example: int = 60, own: int = 30,
    new_tokens: int = 16, shuffled: bool = False, tenants: Sequence[str] = ("",), rate: float = 10.0, seed: int = 0,
    vocab: tuple[int, int] = VOCAB,
) -> list[Arrival]:  # fmt: skip
    """An instruction, `examples` solved examples of the task, and the user's case.

    shuffled: the examples come in a new order each time, as some advise against bias. They are the same examples.
    """
    _sizes(rate, n=n, tasks=tasks, instruction=instruction, examples=examples, example=example, own=own,
           new_tokens=new_tokens)  # fmt: skip
    draw = _Draw(seed, vocab)
    kinds = [(draw.text(instruction), [draw.text(example) for _ in range(examples)]) for _ in range(tasks)]
    out = []
    for now in draw.times(n, rate):
        task, tenant = draw.rng.randrange(tasks), draw.rng.choice(list(tenants))
        first, solved = kinds[task]
        order = draw.rng.sample(range(examples), examples)  # drawn in both cases, so that all else stays the same
        chosen = [solved[i] for i in (order if shuffled else range(examples))]
        tokens = first + tuple(t for e in chosen for t in e) + draw.text(own)
        out.append(Arrival(now, tokens, new_tokens, tenant, f"task {task}"))
    return out


def retrieval(
    n: int = 16, *, library: int = 12, documents: int = 3, document: int = 120, instruction: int = 32, own: int = 24,
    new_tokens: int = 32, order: str = "rank", skew: float = 1.1, tenants: Sequence[str] = ("",), rate: float = 10.0,
    seed: int = 0, vocab: tuple[int, int] = VOCAB,
) -> list[Arrival]:  # fmt: skip
    """Retrieval-augmented generation: an instruction, `documents` of a library, then the question.

    Documents are drawn without repetition, the popular ones more often (weight 1 / rank ** skew). order says how they
    stand in the prompt: "rank" is the order in which retrieval found them, different for each question; "library" is
    always the same order, popular first; "question first" puts the question before them.
    """
    _sizes(rate, n=n, library=library, documents=documents, document=document, instruction=instruction, own=own,
           new_tokens=new_tokens)  # fmt: skip
    if order not in ("rank", "library", "question first"):
        raise MinillmError(f"order is 'rank', 'library' or 'question first', got {order!r:.80}")
    if documents > library:
        raise MinillmError(f"{documents} different documents cannot be drawn from a library of {library}")
    draw = _Draw(seed, vocab)
    first, shelf = draw.text(instruction), [draw.text(document) for _ in range(library)]
    out = []
    for now in draw.times(n, rate):
        found: list[int] = []
        for _ in range(documents):
            left = [i for i in range(library) if i not in found]
            found += draw.rng.choices(left, [(i + 1) ** -skew for i in left])
        tenant, question = draw.rng.choice(list(tenants)), draw.text(own)
        body = tuple(t for i in (sorted(found) if order == "library" else found) for t in shelf[i])
        tokens = first + (question + body if order == "question first" else body + question)
        group = "documents " + ", ".join(map(str, sorted(found)))
        out.append(Arrival(now, tokens, new_tokens, tenant, group))
    return out


def multi_turn(
    conversations: int = 4, *, turns: int = 4, system: int = 32, message: int = 30, new_tokens: int = 40,
    think: float = 5.0, tenants: Sequence[str] = ("",), rate: float = 1.0, seed: int = 0,
    vocab: tuple[int, int] = VOCAB, answer: Callable[[Sequence[int]], Sequence[int]] | None = None,
) -> list[Arrival]:  # fmt: skip
    """Chats: each turn sends the whole history again, with one message more. Conversations interleave.

    answer(prompt) gives the tokens of an answer, `new_tokens` of them. Without it they are drawn, and an engine, which
    writes other ones, can reuse a turn's prompt, and not its answer. think: mean seconds between two turns.
    """
    _sizes(rate, conversations=conversations, turns=turns, system=system, message=message, new_tokens=new_tokens)
    draw = _Draw(seed, vocab)
    first = draw.text(system)
    out = []
    for c, start in enumerate(draw.times(conversations, rate)):
        now, history, tenant = start, first, draw.rng.choice(list(tenants))
        for _ in range(turns):
            history += draw.text(message)
            out.append(Arrival(now, history, new_tokens, tenant, f"conversation {c}"))
            history += tuple(answer(history)) if answer else draw.text(new_tokens)
            now += draw.rng.expovariate(1 / think)
    return sorted(out, key=lambda a: a.time)


def reusable(workload: Sequence[Arrival], block_size: int, *, apart: bool = True) -> list[int]:
    """Tokens that each request would find in a cache that forgets nothing, in order of arrival: the best case.

    Whole blocks, at least one token left to compute, prompts only. Each request is computed before the next arrives.
    apart: tenants see only their own.
    """
    seen: set[tuple[str, tuple[int, ...]]] = set()
    out = []
    for a in workload:
        who = a.tenant if apart else ""
        ends = range(block_size, len(a.tokens) + 1, block_size)
        prefixes = [(who, a.tokens[:end]) for end in ends]
        known = next((i for i, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes))
        out.append(min(known, (len(a.tokens) - 1) // block_size) * block_size)
        seen.update(prefixes)
    return out
