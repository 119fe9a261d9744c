"""Where the time of a decode step goes, term by term. Used by `bench single`, and by lessons 02 and 07.

The functions a step is made of are wrapped with a clock while the engine runs; nested calls are taken off the outer
one. "norms" holds the residual additions too: kernels do both in one pass. What no wrapper saw is glue: Python between
the operators. On a GPU each wrapper waits for the device, so the terms there are serialised and their sum is more than
a step. CUDA graphs are left out while the clock runs: a replay has no parts to wrap.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from minillm.bench.common import synchronize

TERMS = ("linears", "lm_head", "attention", "norms", "rope_kv_write", "activation", "sampling", "text", "glue")


class Account:
    """Exclusive seconds by term."""

    def __init__(self, device: str):
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []  # seconds already taken by calls inside each open one

    def wrap(self, term: str | Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            name = term if isinstance(term, str) else term(*args)
            synchronize(self.device)
            start = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                synchronize(self.device)
                spent = time.perf_counter() - start
                self.seconds[name] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return timed


@contextmanager
def accounting(engine: Any) -> Iterator[Account]:
    """Wrap the parts of this engine's step; everything is put back at the end."""
    from minillm import engine as engine_module
    from minillm.cache.contiguous import ContiguousKVCache
    from minillm.models.linear import Linear
    from minillm.quant import QuantLinear

    account = Account(str(engine.model.device))
    product = lambda self, *args, **kwargs: "lm_head" if self is engine.model.lm_head else "linears"
    places: list[tuple[Any, str, Any]] = [
        (Linear, "__call__", product),
        (QuantLinear, "__call__", product),
        (engine.model.ops, "rms_norm", "norms"),
        (engine.model.ops, "add_rms_norm", "norms"),
        (engine.model.ops, "swiglu", "activation"),
        (engine.model.ops, "angles", "rope_kv_write"),
        (engine.model.ops, "rope", "rope_kv_write"),
        (engine.sampler, "sample", "sampling"),
        (engine_module.OutputProcessor, "push", "text"),
    ]
    runner = engine.runner  # a paged one holds its backend, a contiguous one makes its cache for each group
    backends = [ContiguousKVCache, getattr(runner, "make_cache", None), getattr(runner, "attention", None)]
    for backend in dict.fromkeys(b for b in backends if hasattr(b, "forward")):
        places += [(backend, "forward", "attention"), (backend, "plan", "attention")]
        places += [(backend, name, "rope_kv_write") for name in ("write", "rope_write") if hasattr(backend, name)]
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
    graphs = getattr(runner, "graphs", None)
    try:
        if graphs is not None:
            runner.graphs = None
        for owner, name, term in places:
            setattr(owner, name, account.wrap(term, getattr(owner, name)))
        yield account
    finally:
        if graphs is not None:
            runner.graphs = graphs
        for owner, name, old in before:
            if old is None:
                delattr(owner, name)  # it was found on the class, not on the instance
            else:
                setattr(owner, name, old)


def decode_account(llm: Any, prompt: list[int], new: int) -> dict[str, float]:
    """Seconds of one decode step by term, averaged over the `new - 1` steps after the prompt; "total": wall time."""
    from minillm.request import SamplingParams

    request = llm.engine.make_request(prompt, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))
    with accounting(llm.engine) as account:
        start, steps = 0.0, -1
        for _ in llm.engine.run([request]):
            if steps < 0:  # the first token came from the prompt: the account starts behind it
                account.seconds.clear()
                start = time.perf_counter()
            steps += 1
        total = time.perf_counter() - start
    spent = {term: account.seconds.get(term, 0.0) / steps for term in TERMS}
    spent["glue"] = total / steps - sum(spent.values())
    return spent | {"total": total / steps}
