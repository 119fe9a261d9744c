"""A learner's answers in a live engine: mounted, really called, the same tokens; and what is wrong is said in words."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import LLM, AsyncLLM, MinillmError, SamplingParams
from minillm.cli import main
from minillm.course import notebook as nbk
from minillm.course.answers import run
from minillm.course.mount import load, load_all
from minillm.models.detokenizer import IncrementalDetokenizer
from minillm.stop import StopStrings
from tests.conftest import tiny_hf

ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS = {path.name[:2]: path for path in sorted((ROOT / "solutions").glob("[0-9]*.ipynb"))}
PROMPTS = [[5, 6], [7] * 20, [8], [9] * 33, [10, 11, 12]]
GREEDY = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 20, 25, 3, 30)]
SMALL = {"max_model_len": 64, "dtype": "float32", "device": "cpu", "num_kv_blocks": 12}


def test_every_solution_mounts_what_its_table_says_and_the_others_say_who_has_parts():
    names = {
        "02": ["kv_cache"], "03": ["sampler", "detokenizer", "stops"], "05": ["attention"],
        "06": ["allocator", "attention"], "09": ["scheduler"], "10": ["scheduler"], "11": ["prefix_cache"],
        "12": ["allocator", "policy", "scheduler"],
    }  # fmt: skip
    for number, path in SOLUTIONS.items():
        if number in names:
            assert list(load(path).names) == names[number]
        elif number <= "12":
            with pytest.raises(
                MinillmError, match=rf"exercise {number} has no part of an engine; these have: 02 \(kv_c"
            ):
                load(path)
    taken = load(f"{SOLUTIONS['11']}:11.5")
    assert (taken.names, taken.options["enable_prefix_caching"]) == ({"eviction": "11.5 eviction_key"}, True)


@pytest.mark.parametrize("number", [n for n in SOLUTIONS if n in {"02", "03", "05", "06", "09", "10", "11", "12"}])
def test_a_fresh_exercise_has_nothing_to_mount(number):
    path = ROOT / "exercises" / SOLUTIONS[number].name
    with pytest.raises(MinillmError, match=rf"nothing to mount: {number}\.\d \w+ is not written yet"):
        load(path)


# In an engine


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """A random Qwen3 of 211 words."""
    folder = tmp_path_factory.mktemp("mount") / "model"
    shutil.copytree(tiny_folder("qwen3"), folder)
    return _with_words(folder)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The same with heads of 16, the least that a kernel multiplies, and one layer."""
    folder = tmp_path_factory.mktemp("mount") / "wide"
    tiny_hf("qwen3", head_dim=16, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1).save_pretrained(
        folder
    )
    return _with_words(folder)


def _with_words(folder):
    Backend(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def answers(llm, prompts=PROMPTS, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


@pytest.fixture(scope="module")
def plain(folder):
    return answers(LLM(folder, **SMALL))


def calls(work):
    """The functions of notebooks that `work` calls, by name."""
    seen = set()

    def look(frame, event, _):
        if event == "call" and ".ipynb, code cell" in frame.f_code.co_filename:
            seen.add(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        return work(), seen
    finally:
        sys.setprofile(None)


CALLED = [  # a path's end, options of the engine, what must be called
    ("02", {"num_kv_blocks": None}, {"plan", "write", "forward", "move", "append", "attend"}),
    ("03:03.6", {}, {"draw", "tempered", "penalties"}),
    ("03:03.7", {}, {"append", "finish"}),
    ("03", {}, {"draw", "append", "finish"}),
    ("05", {}, {"attend_chunk", "fold"}),
    ("06:06.2", {}, {"allocate", "free", "num_free"}),
    ("06:06.2", {"enable_prefix_caching": True}, {"allocate", "free", "num_free", "share"}),
    ("06:06.4", {}, {"paged_attention", "slot_mapping"}),
    ("06", {}, {"allocate", "free", "paged_attention", "slot_mapping"}),
    ("09", {}, {"add", "schedule", "finish", "running", "num_waiting"}),
    ("10", {"max_num_batched_tokens": 8}, {"add", "schedule", "finish", "running", "num_waiting", "plan_step"}),
    ("11", {"num_kv_blocks": 6}, {"block_keys", "match", "insert", "evict"}),
    ("11:11.5", {"num_kv_blocks": 6}, {"eviction_key"}),
    ("12", {"num_kv_blocks": 5, "watermark": 0}, {"allocate", "free", "key", "make_room"}),
    ("12:12.2,12.3", {"num_kv_blocks": 5, "watermark": 0}, {"allocate", "free", "key", "victim"}),
]


def path_of(end):
    number, _, tasks = end.partition(":")
    return str(SOLUTIONS[number]) + (f":{tasks}" if tasks else "")


@pytest.mark.parametrize(("end", "options", "wanted"), CALLED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_mounted_answer_is_called_and_the_tokens_are_the_same(folder, plain, end, options, wanted):
    mounted = load(path_of(end))
    llm = LLM(folder, **mounted.config(SMALL | options), parts=mounted.parts)
    got, seen = calls(lambda: answers(llm))
    assert got == plain
    assert wanted <= seen
    if llm.engine.cache is not None:
        assert llm.engine.cache.num_live == 0
        assert llm.engine.cache.num_free + llm.engine.cache.num_cached == llm.engine.config.num_kv_blocks


def test_the_kernel_of_06_decodes_and_is_named_slow(wide):
    mounted = load(path_of("06:06.2,06.5"))
    assert any("06.5 paged_decode: on a CPU Triton interprets it" in line for line in mounted.lines())
    prompts, params = [[5, 6], [9] * 18], [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 2)]
    got, seen = calls(lambda: answers(LLM(wide, **mounted.config(SMALL), parts=mounted.parts), prompts, params))
    assert got == answers(LLM(wide, **SMALL), prompts, params)
    assert {"paged_decode", "slot_mapping", "allocate"} <= seen


def test_heads_that_the_kernel_cannot_multiply_are_refused(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    _with_words(folder)
    mounted = load(path_of("06:06.5"))
    with pytest.raises(MinillmError, match="paged_decode needs heads of a power of two from 16, this model has"):
        LLM(folder, **mounted.config(SMALL), parts=mounted.parts)


STOPPING = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop, include_stop_str_in_output=include,
                   min_tokens=least)
    for stop, include, least in (
        (" w", False, 0), (["1 w", "zz"], True, 0), ("5", False, 4), ([], False, 0), ("9", True, 12),
    )
]  # fmt: skip


def test_the_stop_strings_of_03_end_the_same_texts(folder):
    mounted = load(path_of("03:03.7,03.8"))
    expected = answers(LLM(folder, **SMALL), params=STOPPING)
    assert {reason for _, _, reason in expected} == {"stop", "length"}
    got, seen = calls(lambda: answers(LLM(folder, **SMALL, parts=mounted.parts), params=STOPPING))
    assert got == expected
    assert {"append", "feed", "finish"} <= seen


def test_the_draws_of_03_depend_on_seed_and_position_alone(folder):
    """With and without the learner's filters: the same numbers over the same distribution."""
    drawn = [SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=i,
                            max_tokens=8, logit_bias={3: 2.0}, logprobs=2) for i in range(5)]  # fmt: skip
    mounted = load(path_of("03:03.6"))
    llm = LLM(folder, **SMALL, parts=mounted.parts)
    got, seen = calls(lambda: answers(llm, params=drawn))
    assert {"draw", "nucleus", "min_p", "penalties"} <= seen
    assert answers(llm, PROMPTS[::-1], drawn[::-1]) == got[::-1]
    mounted.parts["sampler"].filters = None
    assert answers(LLM(folder, **SMALL, parts=mounted.parts), params=drawn) == got


async def _served(llm):
    async def one(prompt, params):
        return [o async for o in llm.generate(prompt, params)][-1].outputs[0].token_ids

    return await asyncio.wait_for(asyncio.gather(*map(one, PROMPTS, GREEDY)), 120)


@pytest.mark.parametrize("ends", [["03", "09", "12:12.2,12.3"], ["03:03.7", "10", "05", "11"], ["12", "06:06.4"]])
def test_several_exercises_serve_together(folder, plain, ends):
    mounted = load_all([path_of(end) for end in ends])
    llm = AsyncLLM(folder, **mounted.config(SMALL), parts=mounted.parts)
    try:
        assert asyncio.run(_served(llm)) == [tokens for tokens, _, _ in plain]
    finally:
        llm.shutdown()


def test_a_contiguous_cache_does_not_serve(folder):
    mounted = load(SOLUTIONS["02"])
    with pytest.raises(MinillmError, match="AsyncLLM serves requests as they come; it needs kv_cache='paged'"):
        AsyncLLM(folder, **mounted.config({"max_model_len": 64}), parts=mounted.parts)


# Text, against the engine's own


@pytest.fixture(scope="module")
def of_03():
    return load(SOLUTIONS["03"]).parts


@given(st.data())
@settings(max_examples=150)
def test_the_detokenizer_of_03_says_what_the_engine_s_says(tokenizer, of_03, data):
    some = tokenizer.encode("Das é 你好 😀 one\n\n two ", add_special_tokens=False)
    token = st.sampled_from([*some, *tokenizer.special_ids]) | st.integers(0, 3000)
    prompt, output = data.draw(st.lists(token, max_size=12)), data.draw(st.lists(token, max_size=40))
    prompt = prompt + tokenizer.encode("a")  # the exercise knows no prompt that ends inside a character
    skip = data.draw(st.booleans())
    texts = []
    for kind in (of_03["detokenizer"], IncrementalDetokenizer):
        one = kind(tokenizer, prompt, skip)
        texts.append([one.append([t]) for t in output] + [one.finish()])
    assert "".join(texts[0]) == "".join(texts[1])


@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.booleans(),
       st.integers(0, 2))  # fmt: skip
def test_the_stops_of_03_say_what_the_engine_s_say(of_03, pieces, stop, include, off):
    """off: pieces at the beginning in which no stop counts. They hold no part of one."""
    said = []
    for kind in (of_03["stops"], StopStrings):
        one = kind(stop, include)
        shown = [one.feed("xyz", False) for _ in range(off)]
        told = []
        for piece in pieces:
            told.append(one.completes(piece))
            shown.append(one.feed(piece))
            told.append(one.matched)
        shown.append(one.finish())
        # With include_stop an answer may hold text back or not: only the whole must be equal.
        said.append((told, "".join(shown) if include else shown))
    assert said[0] == said[1]


# What is wrong is said


def changed(tmp_path, number, *changes):
    """The solution with pieces of its text replaced: a learner's notebook."""
    nb = nbk.read(SOLUTIONS[number])
    for old, new in changes:
        cells = [cell for cell in nbk.code_cells(nb) if old in nbk.source(cell)]
        assert cells, old
        cells[0]["source"] = nbk.source(cells[0]).replace(old, new)
    path = tmp_path / SOLUTIONS[number].name
    nbk.write(path, nb)
    return path


SETUP = "from minillm.course import check, needs"
CELLS = [  # the number of the notebook, a change, the error
    ("12", (SETUP, SETUP + "\n\ndef f(:\n    pass"), r"code cell 1, line 3: def f\(:: SyntaxError: "),
    ("12", (SETUP, SETUP + "\nx = 1 / 0"), r"code cell 1, line 2: x = 1 / 0: ZeroDivisionError: division by zero"),
    ("12", (SETUP, SETUP + "\nimport no_such_module"), "code cell 1, line 2: .*No module named 'no_such_module'"),
    ("12", (SETUP, SETUP + "\nraise SystemExit(3)"), "code cell 1, line 2: .*SystemExit: 3"),
    ("12", (SETUP, SETUP + "\nwhile True: pass"), r"code cell 1: did not end within 0\.3 s; is there a loop"),
    ("12", ("def make_room(me: int, need: int, ", "def make_room(me: int, "),
     r"12\.4 make_room is called with 5 arguments, and cannot be \(too many positional arguments\); keep"),
    ("12", ("def allocate(self, n: int)", "def allocate(self)"), r"12\.2 BlockAllocator\.allocate is called with 1"),
    ("12", ("def allocate(", "def alocate("), r"12\.2 BlockAllocator has no allocate; keep the names of the task"),
    ("12", ("def __init__(self, num_blocks: int)", "def __init__(self)"),
     r"12\.2 BlockAllocator is called with 1 argument, and cannot be"),
    ("03", ("def feed(self, text: str)", "def feed(self)"), r"03\.8 StopStrings\.feed is called with 1 argument, and"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "change", "words"), CELLS)
def test_a_notebook_that_does_not_run_or_fit_is_an_error_in_words(tmp_path, number, change, words):
    path = changed(tmp_path, number, change)
    with pytest.raises(MinillmError, match=words) as caught:
        load(path, cell_s=0.3 if "while True" in change[1] else 60)
    assert str(path) in str(caught.value)


PROMPT_OF_03_6 = ("        tokens.append(min(int(passed.sum()), int(row.nonzero().max())))", "        pass")
NONSENSE = [  # what to mount, a change, options, the error
    ("03:03.6", PROMPT_OF_03_6, {}, r"draw must return a list of \d token ids, got \[\]"),
    ("03:03.6", ("    return torch.nn.functional.one_hot(x.argmax(), len(x)).float()", "    return None"), {},
     r"tempered must return a tensor of \[211\], got a NoneType"),
    ("03:03.7", ("return delta", "return None"), {}, "Detokenizer.append must return text, got None"),
    ("03:03.8", ('return text[: len(text) - keep]', "return 7"), {}, "StopStrings.feed must return text, got 7"),
    ("05", ("out[:, h] = acc / l[:, None]\n    return out", "out[:, h] = acc / l[:, None]\n    return out[:, :1]"), {},
     "attend_chunk must return a tensor"),
    ("06:06.2", ("return ids", "return ids[:1] * n"), {}, "they must be 2 different ones"),
    ("06:06.2", ("return len(self.free_ids)", 'return "many"'), {}, "num_free must be a number"),
    ("06:06.4", ("return slots + [-1]", "return [0] * len(slots) + [-1]"), {}, "slot_mapping must return 59 different"),
    ("06:06.4", ('"ht,thd->hd", scores.softmax(-1), v)', '"ht,thd->h", scores.softmax(-1), v)'), {},
     "paged_attention must return a tensor"),
    ("09", ("return [(name, behind(name)) for name in self.running]", "return 7"), {}, r"must return a list of \(name"),
    ("09", ("return [(name, behind(name)) for name in self.running]", "return []"), {}, "scheduled nothing in"),
    ("10", ("        return rows", '        return [("nobody", 3)]'), {}, "names request 'nobody', which was never"),
    ("11", ("        return ids", "        return None"), {}, "match of the prefix cache must return a list of ids"),
    ("11", ("return gone", "return [99]"), {"num_kv_blocks": 6}, "evict gave block 99, which is not in the cache"),
    ("11", ("return keys", "return keys + keys"), {}, "block_keys gave"),
    ("11:11.5", ("return last_used + younger_by", 'return "old"'), {}, "eviction_key must return a number, got 'old'"),
    ("12:12.3", ('return request["arrival"] + seconds_a_step * request["priority"]', "pass"), {},
     "Policy.key must return a number, got None"),
    ("12:12.3", ('return last["id"]', 'return "?"'), {"num_kv_blocks": 5, "watermark": 0}, "victim returned '?'"),
    ("12:12.4", ("return gone", "return []"), {"num_kv_blocks": 5, "watermark": 0}, r"make_room returned \[\] for"),
]  # fmt: skip


@pytest.mark.parametrize(("end", "change", "options", "words"), NONSENSE)
def test_an_answer_that_returns_nonsense_is_an_error_in_words(tmp_path, folder, end, change, options, words):
    number, _, tasks = end.partition(":")
    mounted = load(f"{changed(tmp_path, number, change)}{':' * bool(tasks)}{tasks}")
    params = [p.replace(stop=["zz"]) for p in GREEDY] if tasks == "03.8" else GREEDY

    def work():
        answers(LLM(folder, **mounted.config(SMALL | options), parts=mounted.parts), params=params)

    with pytest.raises(MinillmError, match=f"(?s){words}"):
        work()


RAISES = [  # what to mount, a change
    ("03:03.7", ("        self.decode = decode", "        raise ValueError('mine')")),
    ("03:03.8", ("        self.stop, self.include_stop = stop, include_stop", "        raise ValueError('mine')")),
    ("06:06.2", ("if n > len(self.free_ids):", "raise ValueError('mine')\n        if False:")),
    ("09", ("        while self.waiting and", "        raise ValueError('mine')\n        while self.waiting and")),
    ("09", ("return [(name, behind(name)) for name in self.running]", "return []")),
    ("09", ("        heapq.heappush(self.wait", "        raise ValueError('mine')\n        heapq.heappush(self.wait")),
    ("10", ("        return rows", '        return [("nobody", 3)]')),
    ("11", ("return gone", "return [99]")),
    ("12:12.3", ('seconds_a_step = 10.0', "raise ValueError('mine')")),
    ("12:12.3", ('return request["arrival"] + seconds_a_step * request["priority"]', "pass")),
    ("12:12.4", ("return gone", "return []")),
]  # fmt: skip


@pytest.mark.parametrize(("end", "change"), RAISES)
def test_a_broken_answer_fails_its_requests_and_no_reader_waits_for_ever(tmp_path, folder, end, change):
    number, _, tasks = end.partition(":")
    mounted = load(f"{changed(tmp_path, number, change)}{':' * bool(tasks)}{tasks}")
    llm = AsyncLLM(folder, **mounted.config(SMALL | {"num_kv_blocks": 5}), parts=mounted.parts)

    async def one(prompt, params):
        params = params.replace(stop=["zz"] if tasks == "03.8" else [])
        async with asyncio.timeout(120):
            return [o async for o in llm.generate(prompt, params)][-1]

    async def everybody():
        return await asyncio.gather(*map(one, PROMPTS, GREEDY), return_exceptions=True)

    try:
        errors = [e for e in asyncio.run(everybody()) if isinstance(e, BaseException)]
    finally:
        llm.shutdown()
    assert errors
    assert all(isinstance(e, MinillmError) or str(e) == "mine" for e in errors), errors


def test_a_class_that_cannot_be_made_is_an_error_in_words(tmp_path):
    path = changed(tmp_path, "12", ("class Policy:", "class Policy:\n    def __init__(self): self.x = 1 / 0\n"))
    with pytest.raises(MinillmError, match=r"12\.3 Policy: ZeroDivisionError: division by zero"):
        load(path)


def test_what_calls_a_stub_is_not_mounted_and_the_rest_is(tmp_path):
    stub = '    raise NotImplementedError("task 10.2 is not attempted yet: write it here")\n    ### BEGIN SOLUTION'
    nb = changed(tmp_path, "10", ("    ### BEGIN SOLUTION\n    reserved", stub + "\n    reserved"))
    with pytest.raises(
        MinillmError, match=r"10\.4 ChunkedScheduler uses plan_step: 10\.2 plan_step is not written yet"
    ):
        load(nb)
    share = "        for i in ids:\n            if self.references[i] == 0:"
    nb = changed(tmp_path, "12", (share, '        raise NotImplementedError("write it here")\n' + share))
    mounted = load(nb)
    assert list(mounted.names) == ["policy", "scheduler"]
    assert mounted.notes == ["not mounted: 12.2 BlockAllocator is not written yet (share)"]
    with pytest.raises(MinillmError, match=r"12\.2 BlockAllocator is not written yet \(share\)"):
        load(f"{nb}:12.2")


def test_a_learner_s_own_cells_may_call_stubs_and_print(tmp_path, capfd):
    path = changed(tmp_path, "12", (SETUP, SETUP + "\nprint('hello')\n%matplotlib inline\nraise NotImplementedError"))
    assert "allocator" in load(path).parts
    assert capfd.readouterr() == ("", "")


def test_an_answer_is_what_its_name_stood_for_at_its_check(tmp_path):
    path = changed(tmp_path, "12", ("def swap_or_recompute(", "make_room = None\n\ndef swap_or_recompute("))
    assert load(f"{path}:12.4").names == {"scheduler": "12.4 make_room"}


def test_two_notebooks_keep_apart():
    assert run(SOLUTIONS["06"]).found["06.2"] is not run(SOLUTIONS["06"]).found["06.2"]


TOGETHER = [
    (["06:06.2", "12"], r"the allocator is given twice, 06\.2 BlockAllocator by .*06_paged.* and 12\.2 BlockAll"),
    (["06", "06"], "the allocator is given twice"),
    (["09", "12:12.4"], "the scheduler is given twice"),
    (["11:11.5", "11:11.4"], r"11\.5 eviction_key \(eviction\) would never be called beside 11\.4 PrefixCache"),
    (["02", "05"], r"05\.6 attend_chunk needs kv_cache='paged', and 02\.7 KVCache needs 'contiguous'; give one of"),
    (["06:06.6"], r"06\.6 is not a part of an engine; these are: 06\.2 BlockAllocator \(allocator\); 06\.4"),
    (["06:06.4,06.5"], r"06\.5 paged_decode, since 06\.4 paged_attention with 06\.3 slot_mapping is the attention"),
]  # fmt: skip


@pytest.mark.parametrize(("ends", "words"), TOGETHER)
def test_parts_that_exclude_each_other_are_named(ends, words):
    with pytest.raises(MinillmError, match=words):
        load_all([path_of(end) for end in ends])


def test_files_that_are_no_exercise_are_named(tmp_path):
    with pytest.raises(MinillmError, match=r"nothing\.ipynb does not exist"):
        load(tmp_path / "nothing.ipynb")
    (tmp_path / "text.ipynb").write_text("hello")
    with pytest.raises(MinillmError, match="is not a notebook"):
        load(tmp_path / "text.ipynb")
    with pytest.raises(MinillmError, match="holds no task of an exercise"):
        load(ROOT / "notebooks" / "06_paged_attention.ipynb")


def test_options_that_somebody_asked_for_are_kept_or_refused():
    mounted = load(path_of("06"))
    assert mounted.config({"dtype": "auto", "kv_cache": None, "max_num_seqs": 4}) == {
        "dtype": "float32", "kv_cache": "paged", "max_num_seqs": 4,
    }  # fmt: skip
    with pytest.raises(MinillmError, match=r"06\.4 paged_attention.* needs dtype='float32', and 'bfloat16' was asked"):
        mounted.config({"dtype": "bfloat16"})


def test_generate_uses_an_exercise_and_says_so_on_stderr(folder, tmp_path, capsys):
    how = ["generate", "w5 w6", "--raw", "--max-tokens", "6", "--model", str(folder), "--dtype", "float32"]
    assert main(how) == 0
    plain = capsys.readouterr().out
    assert main([*how, "--use", path_of("06:06.2"), "--use", path_of("03")]) == 0
    out, err = capsys.readouterr()
    assert out == plain
    assert err.splitlines()[0] == "mounted: 06.2 BlockAllocator (allocator)"
    assert "with kv_cache='paged'" in err
    assert main([*how, "--use", path_of("04")]) == 2
    assert "has no part of an engine" in capsys.readouterr().err
    assert main([*how, "--use", path_of("06"), "--dtype", "bfloat16"]) == 2
    assert "needs dtype='float32'" in capsys.readouterr().err
    path = changed(
        tmp_path, "09", ("        while self.waiting and", "        x = 1 / 0\n        while self.waiting and")
    )
    assert main([*how, "--use", str(path)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"minillm: error: {path}, code cell 6, line ")
    assert said.endswith(": x = 1 / 0: ZeroDivisionError: division by zero")
