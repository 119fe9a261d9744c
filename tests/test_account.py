"""The account of a decode step: nothing but a few look-ups runs outside its terms, on every cache and backend."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm import LLM
from minillm.attention.paged import PagedSDPA
from minillm.bench import account
from minillm.cache.contiguous import ContiguousKVCache
from minillm.graphs import DecodeGraphs
from minillm.request import SamplingParams

ENGINES = {
    "no cache": {"kv_cache": "none"},
    "contiguous": {},
    "paged": {"kv_cache": "paged", "num_kv_blocks": 8},
    "paged, reference": {"kv_cache": "paged", "num_kv_blocks": 8, "attention_backend": "reference"},
    "codes for weights": {"quantization": "int8"},
    "paged, own part": {"kv_cache": "paged", "num_kv_blocks": 8, "parts": {"attention": PagedSDPA}},
}


class Outside(TorchDispatchMode):
    """Counts operators that run while no term of the account is open."""

    def __init__(self, book: account.Account):
        super().__init__()
        self.book, self.calls = book, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.book._inner and not func.is_view:
            self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def outside(llm: LLM, steps: int = 3) -> list[str]:
    """Operators outside all terms in a prompt and `steps - 1` decode steps."""
    request = llm.engine.make_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True))
    with account.accounting(llm.engine) as book, Outside(book) as mode:
        for _ in llm.engine.run([request]):
            pass
    return mode.calls


@pytest.mark.model
@pytest.mark.parametrize("name", ENGINES)
def test_no_operator_of_a_layer_is_glue(embedded_folder, name):
    llm = LLM(embedded_folder, dtype="float32", max_model_len=64, **ENGINES[name])
    attention = getattr(llm.engine.runner, "attention", ContiguousKVCache)
    before = dict(vars(attention))
    calls = outside(llm)
    layers = llm.engine.model.config.num_layers
    assert len(calls) < layers, calls  # a few look-ups a step, and nothing that happens in every layer
    assert {name: before.get(name) for name in ("plan", "write", "forward")} == {
        name: vars(attention).get(name) for name in ("plan", "write", "forward")
    }
    assert not any(map(callable, vars(llm.engine.model.ops).values())), "a wrapper was left behind"


@pytest.mark.model
def test_a_backend_that_is_not_wrapped_is_noticed(embedded_folder, monkeypatch):
    """The mutation: the account forgets the write of the paged backend."""
    llm = LLM(embedded_folder, dtype="float32", max_model_len=64, kv_cache="paged", num_kv_blocks=8)
    wrap = account.Account.wrap

    def forgets(self, term, function):
        return function if getattr(function, "__name__", "") == "write" else wrap(self, term, function)

    monkeypatch.setattr(account.Account, "wrap", forgets)
    assert len(outside(llm)) >= llm.engine.model.config.num_layers


@pytest.mark.model
def test_the_terms_of_a_paged_step_sum_to_it_and_attention_is_among_them(embedded_folder):
    llm = LLM(embedded_folder, dtype="float32", max_model_len=64, kv_cache="paged", num_kv_blocks=8)
    spent = account.decode_account(llm, [1, 2, 3], 4)
    assert sum(spent[term] for term in account.TERMS) == pytest.approx(spent["total"])
    assert all(spent[term] > 0 for term in ("linears", "lm_head", "attention", "norms", "rope_kv_write", "activation"))


@pytest.mark.model
def test_graphs_are_set_aside_and_put_back(embedded_folder):
    llm = LLM(embedded_folder, dtype="float32", max_model_len=64, kv_cache="paged", num_kv_blocks=8)
    runner = llm.engine.runner
    runner.graphs = graphs = DecodeGraphs(llm.engine.model, runner.attention, 2)
    with torch.inference_mode(), account.accounting(llm.engine):
        assert runner.graphs is None
    assert runner.graphs is graphs
