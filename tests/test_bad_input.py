"""Odd input to the Python interface, and folders that are broken in their JSON: MinillmError, never another one."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import LLM, EngineConfig, MinillmError, SamplingParams
from minillm.sampler import Sampler

NAN = float("nan")
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", 5), ("stop", {"a": 1}), ("stop", b"x"), ("stop", [1]), ("stop", "\udc80"), ("stop_token_ids", 5),
        ("stop_token_ids", "12"), ("stop_token_ids", [1.5]), ("stop_token_ids", [True]), ("logit_bias", 5),
        ("logit_bias", [1]), ("logit_bias", {1.5: 1}), ("logit_bias", {float("inf"): 1}), ("logit_bias", {True: 1}),
        ("logit_bias", {"x": 1}), ("logit_bias", {1: NAN}), ("logit_bias", {1: None}), ("temperature", 10**400),
        ("temperature", None), ("temperature", NAN), ("top_p", np.array([0.1, 0.2])), ("top_k", np.array([1, 2])),
        ("top_k", 1.0), ("top_k", -2), ("n", None), ("max_tokens", NAN), ("min_tokens", None), ("seed", 2**63),
    ],
)  # fmt: skip
def test_a_sampling_field_is_refused_by_name(field, value):
    with pytest.raises(MinillmError, match=f"^{field}: "):
        SamplingParams(**{field: value})


def test_numbers_of_other_libraries_become_plain_ones():
    p = SamplingParams(
        n=np.int64(2), top_k=np.int32(-1), seed=np.uint64(2**62), temperature=np.float32(0.5), min_p=Fraction(1, 2),
        stop_token_ids=np.array([1, 2]), logit_bias={np.int64(3): np.float32(1), "4": 2},
    )  # fmt: skip
    assert (p.n, p.top_k, p.seed, p.temperature, p.min_p) == (2, 0, 2**62, 0.5, 0.5)
    assert {type(x) for x in (p.n, p.top_k, p.seed, *p.stop_token_ids)} == {int}
    assert {type(x) for x in (p.temperature, p.min_p)} == {float}
    assert (p.stop_token_ids, p.logit_bias) == ((1, 2), {3: 1.0, 4: 2.0})


@pytest.mark.parametrize("kv_cache", ["paged", "contiguous"])
@pytest.mark.parametrize(
    ("field", "value"),
    [(name, value) for name in ("attention_backend", "block_size", "num_kv_blocks", "quantization", "kv_cache_dtype",
                                "enforce_eager", "max_num_seqs")
     for value in (np.array([16, 32]), torch.tensor([16, 32]), 16.0, [16], {})],
)  # fmt: skip
def test_an_option_of_the_wrong_type_is_refused_by_name(kv_cache, field, value):
    with pytest.raises(MinillmError, match=f"^{field} "):
        EngineConfig(kv_cache=kv_cache, **{field: value})
    with pytest.raises(MinillmError, match="^kv_cache "):
        EngineConfig(kv_cache=value)


@pytest.fixture(scope="module")
def small(tiny_folder, tmp_path_factory):
    """A random Llama of 211 words, w0 to w210, with a chat template that joins strings."""
    folder = tmp_path_factory.mktemp("small") / "model"
    shutil.copytree(tiny_folder("llama"), folder)
    words(folder, 211)
    template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def words(folder, count):
    Backend(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0")).save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def tiny(small):
    return LLM(small)


def ids(llm, prompts, params=GREEDY):
    return [o.token_ids for r in llm.generate(prompts, params, use_tqdm=False) for o in r.outputs]


@pytest.mark.parametrize(
    "prompt",
    [None, 5, {"a"}, (x for x in "ab"), {"prompt": 5}, {"prompt": None}, {1: 2, "a": 3}, {"prompt_token_ids": 5},
     {"prompt_token_ids": "abc"}, [[[1]]], [None], [[None]], [1, "a"], [[1.5]], [np.array([[1]])], [np.int64(211)]],
)  # fmt: skip
def test_a_prompt_that_is_none(tiny, prompt):
    with pytest.raises(MinillmError):
        tiny.generate(prompt, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("form", [np.array, torch.tensor, tuple, lambda x: [np.int64(t) for t in x], lambda x: [x]])
def test_arrays_are_lists_of_token_ids(tiny, form):
    assert ids(tiny, form([5, 6])) == ids(tiny, [[5, 6]])
    assert ids(tiny, {"prompt_token_ids": np.array([5, 6])}) == ids(tiny, [[5, 6]])


@pytest.mark.parametrize("params", [5, "x", {"temperature": 0}, [None], (x for x in [GREEDY])])
def test_params_that_are_none(tiny, params):
    with pytest.raises(MinillmError, match="^sampling_params: "):
        tiny.generate([[5]], params, use_tqdm=False)
    with pytest.raises(MinillmError, match="^sampling_params: "):
        tiny.stream([5], params)


@pytest.mark.parametrize("content", [None, 5, NAN, True, {}, ["a"]])
def test_what_a_chat_template_cannot_do_is_an_error_in_words(tiny, content):
    with pytest.raises(MinillmError, match="the chat template refused these messages"):
        tiny.chat([{"role": "user", "content": content}])


@pytest.mark.parametrize("messages", [None, 5, "hi", {"role": "user", "content": "x"}, iter([]), [[]], ["hi"], [5]])
def test_messages_that_are_none(tiny, messages):
    with pytest.raises(MinillmError, match="messages"):
        tiny.chat(messages)


def test_template_variables(tiny):
    message = [{"role": "user", "content": "w1"}]
    for wrong in (5, {3: 5}):
        with pytest.raises(MinillmError, match="^chat_template_kwargs: "):
            tiny.chat(message, chat_template_kwargs=wrong)
    given = {"add_generation_prompt": False, "bos_token": "x"}
    assert len(tiny.chat(message, GREEDY, use_tqdm=False, chat_template_kwargs=given)) == 1


@pytest.mark.parametrize("kv_cache", ["contiguous", "none"])
def test_streams_may_interleave(small, kv_cache):
    """Each run has rows and a cache of its own; an abandoned one between them changes nothing."""
    llm = LLM(small, kv_cache=kv_cache)
    prompts = [[5, 6, 7], [8, 9], [3] * 20]
    alone = ["".join(llm.stream(p, GREEDY)) for p in prompts]
    streams = [llm.stream(p, GREEDY) for p in prompts]
    together = [""] * 3
    for step in range(GREEDY.max_tokens):
        for i, stream in enumerate(streams):
            together[i] += next(stream, "")
        next(llm.stream([step], GREEDY))  # begun, then forgotten
        assert ids(llm, [[7]]) == ids(llm, [[7]])
    assert together == alone


def test_the_longest_prompt_leaves_room_for_one_token(tiny):
    limit = tiny.engine.max_model_len
    free = GREEDY.replace(max_tokens=None)
    assert [len(t) for t in ids(tiny, [[5] * (limit - 1)], free)] == [1]
    assert [len(t) for t in ids(tiny, [[5] * (limit - 3)], GREEDY.replace(max_tokens=10**30))] == [3]
    with pytest.raises(MinillmError, match="at most 255 leave room"):
        ids(tiny, [[5] * limit], free)


class Returns(Sampler):
    """A learner's sampler that returns whatever it is told to."""

    def __init__(self, result):
        self.result = result

    def sample(self, logits, requests):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    "result",
    [None, 5, ([5],), ([], []), ([5, 5], [None]), ([5], []), ([211], [None]), ([-5], [None]), ([1.5], [None]),
     ([None], [None]), (5, 5)],
)  # fmt: skip
def test_a_sampler_that_returns_nonsense_is_told_so_and_the_engine_lives(small, tiny, result):
    own = LLM(small, parts={"sampler": Returns(result)})
    with pytest.raises(MinillmError, match=r"^the sampler "):
        ids(own, [[5]])
    own.engine.sampler = Sampler()
    assert ids(own, [[5]]) == ids(tiny, [[5]])


def test_an_exception_of_a_part_is_the_learner_s_to_see(small, tiny):
    own = LLM(small, parts={"sampler": Returns(ZeroDivisionError("mine"))})
    with pytest.raises(ZeroDivisionError, match="mine"):
        ids(own, [[5]])
    own.engine.sampler = Returns(([torch.tensor(7)], [None]))  # what torch gives is as good as an int
    assert ids(own, [[5]]) == [[7] * 4]
    assert type(ids(own, [[5]])[0][0]) is int


@pytest.mark.parametrize(
    "options",
    [{"parts": 5}, {"parts": ["sampler"]}, {"parts": {"sampler": object()}}, {"parts": {"kv_cache": 5}},
     {"parts": {"detokenizer": 5}}, {"parts": {1: 2, "a": 3}}, {"device": None}, {"device": "cpu:3"}, {"dtype": None}],
)  # fmt: skip
def test_options_that_are_none(small, options):
    with pytest.raises(MinillmError, match="part|device|dtype"):
        LLM(small, **options)


@pytest.mark.parametrize("model", [None, 5, b"smollm2-135m", [], "", "~nobody-here/x", "x" * 5000, "a/" + "x" * 5000])
def test_a_model_that_is_no_name(model):
    with pytest.raises(MinillmError, match="model"):
        LLM(model)


def test_absurd_thread_counts_are_refused_before_torch_sees_them():
    with pytest.raises(MinillmError, match="threads must be at most"):
        EngineConfig(threads=10**8)


# Folders ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(small, tmp_path):
    return shutil.copytree(small, tmp_path / "copy")


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"hidden_size": value}, "hidden_size") for value in ("48", {}, [], NAN, True, 10**30)),
        *(({"vocab_size": value}, "vocab_size") for value in ("48", {}, [], NAN, True, 10**30)),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_attention_heads": 0}, "num_heads must be a positive"),
        ({"num_hidden_layers": 10**30}, "num_layers must be at most"),
        *(({"rms_norm_eps": value}, "rms_norm_eps") for value in ("x", 0, NAN, 10**400)),
        *(({"rope_parameters": {"rope_theta": value}}, "rope_theta") for value in ("x", -1, NAN, 10**400, [])),
        ({"rope_parameters": "linear"}, "rope_parameters must be an object"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' lacks factor"),
        *(({"rope_parameters": LLAMA3 | {name: None}}, f"lacks {name}") for name in [*LLAMA3][2:]),
        ({"rope_parameters": LLAMA3 | {"factor": "8"}}, "factor must be a finite number above 0"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "must be above its low_freq_factor"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": 0}, "hidden_act 0 is not supported"),
        *(({"eos_token_id": value}, "token ids must be whole numbers") for value in ("2", [1, "x"], [[1]], 1.5, True)),
    ],
)  # fmt: skip
def test_a_field_of_the_config_is_refused_by_name(folder, change, message):
    edit(folder, **change)
    with pytest.raises(MinillmError, match=message):
        LLM(folder)


def test_null_is_absent(folder, tiny):
    names = ("head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "hidden_act", "bos_token_id")
    edit(folder, **dict.fromkeys((*names, "rope_scaling", "eos_token_id")))
    assert LLM(folder).engine.model.config.max_position_embeddings == 2048


def test_an_end_token_outside_the_vocabulary_never_comes(folder, tiny):
    (folder / "generation_config.json").write_text('{"eos_token_id": [999, -5]}')
    params = SamplingParams(temperature=0, max_tokens=4, min_tokens=2)
    assert ids(LLM(folder), [[5]], params) == ids(tiny, [[5]])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [b"", b"[]", b"5", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_json_file_that_is_none(folder, name, text):
    (folder / name).write_bytes(text)
    with pytest.raises(MinillmError, match=name.replace(".", r"\.")):
        LLM(folder)


@pytest.mark.parametrize("entry", ["[]", '{"model.norm.weight": 5}', '{"model.norm.weight": "../x.safetensors"}'])
def test_a_shard_index_names_files_of_its_folder(folder, entry):
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {entry}}}')
    with pytest.raises(MinillmError, match="not a valid shard index"):
        LLM(folder)


@pytest.mark.parametrize("template", [5, [{}], [5], {"a": 1}, "{% if", "{{ x.y.z }}", "{{ 1/0 }}"])
def test_a_chat_template_that_is_none(folder, template):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(MinillmError, match="chat template"):
        LLM(folder).chat([{"role": "user", "content": "w1"}])


def test_a_tokenizer_of_another_size(folder):
    words(folder, 500)
    with pytest.raises(MinillmError, match="token id 499 is not in the vocabulary"):
        LLM(folder).generate("w499", GREEDY, use_tqdm=False)
    words(folder, 3)
    (out,) = LLM(folder).generate("w1", GREEDY, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 4
    (folder / "tokenizer.json").unlink()
    with pytest.raises(MinillmError, match=r"has no tokenizer\.json"):
        LLM(folder)


def test_links_are_followed_unless_they_go_round(folder, tmp_path, tiny):
    (tmp_path / "link").symlink_to(folder)
    assert ids(LLM(tmp_path / "link"), [[5]]) == ids(tiny, [[5]])
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(MinillmError, match="model"):
        LLM(tmp_path / "round")


def test_streams_of_one_engine_lose_no_text_however_far_their_readers_lag(small):
    """A step of one stream moves the others along: what they got waits for their readers."""
    llm = LLM(small, dtype="float32")
    alone = ["".join(llm.stream(p, GREEDY)) for p in ([5], [6, 7])]
    fast, slow = (llm.stream(p, GREEDY) for p in ([5], [6, 7]))
    first = next(slow)
    assert ["".join(fast), first + "".join(slow)] == alone
