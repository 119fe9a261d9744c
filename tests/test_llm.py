"""The offline interface: vLLM's names and meanings, results in order, bad input refused by name."""

from __future__ import annotations

import gc
import json
import math
import weakref

import pytest
import torch

from minillm import LLM, MinillmError, SamplingParams
from minillm.errors import RequestError
from minillm.request import TokenLogprob
from minillm.runner import PagedRunner
from minillm.sampler import Sampler

GREEDY = SamplingParams(temperature=0, max_tokens=12)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
pytestmark = pytest.mark.model


def texts(results):
    return [r.outputs[0].text for r in results]


def test_three_lines_give_an_answer(llm):
    (result,) = llm.chat(QUESTION, GREEDY, use_tqdm=False)
    (out,) = result.outputs
    assert out.text == "The capital of France is Paris."
    assert (out.finish_reason, out.stop_reason) == ("stop", None)
    assert out.token_ids[-1] == 2
    assert result.finished
    assert result.prompt_token_ids == llm.get_tokenizer().apply_chat_template(QUESTION)
    assert 0 < result.metrics["time_to_first_token"] <= result.metrics["e2e_latency"]


def test_every_form_of_prompt_means_the_same(llm):
    ids = llm.get_tokenizer().encode("Once upon a time")
    forms = ["Once upon a time", ids, {"prompt": "Once upon a time"}, {"prompt_token_ids": ids}, tuple(ids)]
    assert len(set(texts(llm.generate([*forms], GREEDY, use_tqdm=False)))) == 1
    for form in forms:
        assert len(llm.generate(form, GREEDY, use_tqdm=False)) == 1
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_results_are_in_order_and_a_batch_equals_each_alone(llm):
    prompts = ["One, two,", "The sky is", "def add(a, b):", "Zwei Wörter", "x"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 14, 1, 7)]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, p, result in zip(prompts, params, together, strict=True):
        assert result.prompt == prompt
        assert len(result.outputs[0].token_ids) == p.max_tokens
        assert result.outputs[0].finish_reason == "length"
        (alone,) = llm.generate(prompt, p, use_tqdm=False)
        assert alone.outputs[0].token_ids == result.outputs[0].token_ids


def test_naive_and_cached_engines_give_the_same_tokens(embedded_folder, llm):
    naive = LLM(embedded_folder, dtype="float32", kv_cache="none", max_model_len=128)
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=10, logprobs=1, ignore_eos=True)
    for a, b in zip(*(e.generate(["The moon", "1 + 1 ="], params, use_tqdm=False) for e in (naive, llm)), strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].cumulative_logprob == pytest.approx(b.outputs[0].cumulative_logprob, abs=1e-3)


def test_small_groups_and_large_groups_give_the_same(embedded_folder, llm):
    small = LLM(embedded_folder, dtype="float32", max_num_seqs=2, max_model_len=128)
    prompts = [f"Number {i} is" for i in range(5)]
    assert texts(small.generate(prompts, GREEDY, use_tqdm=False)) == texts(
        llm.generate(prompts, GREEDY, use_tqdm=False)
    )


def test_seeds(llm):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=3)
    first, again = (llm.generate(["Hello", "Bye"], params, use_tqdm=False) for _ in range(2))
    assert [o.token_ids for r in first for o in r.outputs] == [o.token_ids for r in again for o in r.outputs]
    assert len({tuple(o.token_ids) for o in first[0].outputs}) == 3
    assert [o.index for o in first[0].outputs] == [0, 1, 2]
    own = llm.generate("Hello", params.replace(seed=4, n=1), use_tqdm=False)  # seed + index: completion 1 of seed 3
    assert own[0].outputs[0].token_ids == first[0].outputs[1].token_ids
    free = SamplingParams(temperature=1.0, max_tokens=8)
    a, b = llm.generate(["Hello", "Hello"], free, use_tqdm=False)
    assert a.outputs[0].token_ids != b.outputs[0].token_ids


def test_logprobs_are_the_model_s_own_distribution(llm):
    params = SamplingParams(temperature=0.5, top_k=3, seed=1, max_tokens=4, logprobs=5, logit_bias={5: 50.0})
    (result,) = llm.generate("The quick brown", params, use_tqdm=False)
    out = result.outputs[0]
    assert len(out.logprobs) == len(out.token_ids) == 4
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert token in entry
        assert 5 <= len(entry) <= 6
        assert sum(math.exp(e.logprob) for e in entry.values()) <= 1.0 + 1e-5
        assert all(isinstance(e, TokenLogprob) and e.decoded_token for e in entry.values())
    assert out.cumulative_logprob == pytest.approx(sum(e[t].logprob for t, e in zip(out.token_ids, out.logprobs)))
    json.dumps([[vars(e) for e in entry.values()] for entry in out.logprobs], allow_nan=False)


def test_stop_strings_min_tokens_and_the_context_limit(embedded_folder, llm):
    count = "1, 2, 3, 4,"
    free = llm.generate(count, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0].outputs[0].text
    out = llm.generate(count, SamplingParams(temperature=0, max_tokens=20, stop=", 7"), use_tqdm=False)[0].outputs[0]
    assert out.text == free.split(", 7")[0]
    assert (out.finish_reason, out.stop_reason) == ("stop", ", 7")
    long = llm.chat(QUESTION, GREEDY.replace(min_tokens=12), use_tqdm=False)[0].outputs[0]
    assert len(long.token_ids) == 12
    short = LLM(embedded_folder, dtype="float32", max_model_len=16)
    ids = list(range(100, 110))
    out = short.generate([ids], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False)[
        0
    ].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (6, "length")


def test_streaming_gives_the_same_text(llm):
    params = SamplingParams(temperature=0, max_tokens=16, stop=["Paris"])
    prompt = llm.get_tokenizer().render_chat(QUESTION)
    pieces = list(llm.stream(prompt, params))
    assert (
        "".join(pieces)
        == llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
        == "The capital of France is "
    )
    with pytest.raises(RequestError, match="n: a stream carries one"):
        llm.stream(prompt, params.replace(n=2))


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", None, "prompt: it has no tokens"),
        ([[]], None, "prompt: it has no tokens"),
        ([[1, 49152]], None, "token id 49152 is not in the vocabulary"),
        ([[-1]], None, "token id -1"),
        ([[True]], None, "token id True"),
        ([[1.5]], None, r"token id 1\.5"),
        ([[1] * 600], None, "prompt: it has 600 tokens"),
        (["a", 3.0], None, "expected text, token ids or a dict, got float"),
        (b"bytes", None, "got bytes"),
        (None, None, "got NoneType"),
        ({"text": "x"}, None, "needs 'prompt' or 'prompt_token_ids'"),
        ("half \ud83d", None, "half of a surrogate pair"),
        (["a", "b"], [SamplingParams()], "expected one SamplingParams or a list of 2"),
        ("a", SamplingParams(logit_bias={49152: 1.0}), "logit_bias: token id 49152"),
        ("a", SamplingParams(stop_token_ids=[60000]), "stop_token_ids"),
        ([[1] * 510], SamplingParams(min_tokens=5), "min_tokens: 5 asked for"),
    ],
)
def test_bad_input_is_refused_before_any_work(llm, prompts, params, message, monkeypatch):
    monkeypatch.setattr(llm.engine, "run", lambda *_: pytest.fail("the engine ran"))
    with pytest.raises(MinillmError, match=message):
        llm.generate(prompts, params, use_tqdm=False)


def test_bad_options_are_refused(embedded_folder):
    for options, message in (
        ({"dtype": "int3"}, "dtype 'int3'"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"device": "cuda:99"}, "is not here|not supported"),
        ({"kv_cache": "magnetic"}, "kv_cache 'magnetic'"),
        ({"max_model_len": 10**9}, "more than the model's 8192"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive"),
        ({"seed": -1}, "seed must be"),
        ({"speculative_config": 2}, "no option 'speculative_config'"),
        ({"parts": {"spam": 1}}, "'spam' is not a part"),
    ):
        with pytest.raises(MinillmError, match=message):
            LLM(embedded_folder, **options)


class LastToken(Sampler):
    """A learner's sampler that draws the last token of the vocabulary."""

    def sample(self, logits, requests):
        return [logits.shape[1] - 1] * len(requests), [None] * len(requests)


def test_a_learner_s_part_runs_in_the_engine(embedded_folder):
    own = LLM(embedded_folder, dtype="float32", max_model_len=64, parts={"sampler": LastToken()})
    assert own.generate("a", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids == [49151] * 3


def test_a_row_without_a_distribution_ends_its_request_and_no_other(llm, monkeypatch):
    forward = PagedRunner.forward

    def damaged(self, requests, num_new=None):
        logits = forward(self, requests, num_new).clone()
        for row, r in zip(logits, [r for r in requests if not r.num_new_tokens], strict=True):
            if r.prompt_token_ids == [666] and r.output_token_ids:
                row.fill_(math.nan)
        return logits

    monkeypatch.setattr(PagedRunner, "forward", damaged)
    good, bad, also = llm.generate(["One, two,", [666], "The sky is"], GREEDY, use_tqdm=False)
    assert (bad.outputs[0].finish_reason, len(bad.outputs[0].token_ids)) == ("error", 1)
    assert "logits are NaN" in bad.outputs[0].stop_reason
    with pytest.raises(MinillmError, match="logits are NaN"):
        list(llm.stream([666], GREEDY))
    monkeypatch.undo()
    assert texts([good, also]) == texts(llm.generate(["One, two,", "The sky is"], GREEDY, use_tqdm=False))


def test_an_abandoned_stream_leaves_the_engine_usable(llm):
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=50))
    next(stream)
    del stream
    assert llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text.endswith("Paris.")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_answers_too(embedded_folder, dtype):
    small = LLM(embedded_folder, dtype=dtype, max_model_len=64)
    assert small.engine.model.dtype == getattr(torch, dtype)
    assert "Paris" in small.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize(
    "options",
    [{}, {"enable_prefix_caching": True, "kv_host_bytes": 1 << 20}, {"kv_cache": "contiguous"}, {"kv_cache": "none"}],
    ids=["paged", "prefix cache and tiers", "contiguous", "none"],
)
def test_an_engine_that_nobody_refers_to_is_gone_at_once(embedded_folder, options):
    """A reference cycle would keep a model and a pool until the collector runs, which big tensors do not hasten."""
    gc.collect()
    gc.disable()
    try:
        llm = LLM(embedded_folder, dtype="float32", max_model_len=64, max_num_seqs=2, **options)
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)
        engine, model = weakref.ref(llm.engine), weakref.ref(llm.engine.model)
        del llm
        assert engine() is None
        assert model() is None
    finally:
        gc.enable()
