"""Lesson 13's exercise: its references agree with the server's own parts, and the answers serve in a live server."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import LLM, AsyncLLM, MinillmError, SamplingParams
from minillm.course import notebook as nbk
from minillm.course.adapters.server import as_dict, mounted_admission, mounted_stops
from minillm.course.checks import admitting, live_stops, serving_times, token_buckets
from minillm.course.mount import load
from minillm.roofline import capacity
from minillm.server.admission import Ask, BoundedQueue, Queue, Refusal, judged_admit, predicted_wait
from minillm.server.buckets import TokenBucket
from minillm.stop import StopStrings
from minillm.trace import latency

SOLUTION = Path(__file__).resolve().parents[1] / "solutions" / "13_serving.ipynb"

# The references, against what the server itself uses


@given(st.lists(st.text("ab\u0301", max_size=5), max_size=6), st.lists(st.text("ab\u0301", min_size=1, max_size=4),
       max_size=3), st.booleans(), st.integers(0, 4))  # fmt: skip
@settings(max_examples=300)
def test_stops_are_those_of_the_engine(pieces, stops, include, off):
    said = []
    for kind in (live_stops.StreamStops, StopStrings):
        one = kind(stops, include)
        said.append([(one.feed(piece, i >= off), one.matched) for i, piece in enumerate(pieces)] + [one.finish()])
    assert said[0] == said[1]


@given(st.lists(st.tuples(st.sampled_from(["take", "take", "give"]), st.integers(1, 20), st.integers(0, 64)),
                max_size=30), st.sampled_from([0.5, 1.0, 4.0]))  # fmt: skip
def test_a_bucket_is_that_of_the_quotas(calls, rate):
    now, mine, theirs = 0.0, token_buckets.TokenBucket(rate, 16.0), TokenBucket(rate * 60, 16.0)
    for what, amount, later in calls:
        now += later / 8
        if what == "give":
            mine.give(amount, now)
            theirs.give(amount)
        else:
            wait = theirs.wait(amount, now)
            assert mine.take(amount, now) == pytest.approx(wait, abs=1e-6)
            assert theirs.take(amount, now) == (wait == 0)
        mine.give(0, now)
        assert mine.level == pytest.approx(theirs.level(now), abs=1e-6)


STEPS = st.floats(0, 100).map(lambda x: round(x, 3))


@given(st.lists(STEPS, max_size=6), st.integers(1, 6), st.lists(st.integers(1, 50), max_size=9), st.integers(0, 500),
       st.none() | st.just(capacity.StepModel(0.02, 0.001, 0.002)))  # fmt: skip
def test_a_wait_is_that_of_the_server(left, places, outputs, prefill, costs):
    """The exercise counts a step as of a full batch; the server knows better while places are empty."""
    queue = Queue(running=len(left), running_left=tuple(left), max_num_seqs=places, waiting=len(outputs),
                  ahead=len(outputs), ahead_output=float(sum(outputs)), prefill_left=prefill, costs=costs)  # fmt: skip
    mine = admitting.Admission(*admitting.LIMITS).wait(as_dict(queue))
    theirs = predicted_wait(queue)
    if costs is None:
        assert mine is theirs is None
    elif len(left) + len(outputs) >= max(places, len(left)):  # all places are taken
        assert mine == pytest.approx(theirs)
    else:
        assert mine >= theirs or mine == pytest.approx(theirs)


ASKS = st.builds(
    Ask, prompt_bytes=st.integers(0, 5000), prompt_tokens=st.none() | st.integers(0, 600),
    max_tokens=st.none() | st.integers(1, 600), n=st.integers(1, 6),
)  # fmt: skip


@given(ASKS, st.lists(STEPS, max_size=4), st.integers(0, 6), st.booleans(), st.none() | st.integers(0, 1000))
@settings(max_examples=300)
def test_who_is_refused_is_who_the_server_refuses(ask, left, waiting, known, waiting_tokens):
    """Deadlines aside: the server allows for an error of its prediction there, and the exercise does not."""
    queue = Queue(running=len(left), running_left=tuple(left), max_num_seqs=4, waiting=waiting, ahead=waiting,
                  waiting_tokens=waiting_tokens or 0, ahead_output=10.0 * waiting,
                  costs=capacity.StepModel(0.05, 0.0, 0.0) if known else None)  # fmt: skip
    bound = None if waiting_tokens is None else 1000
    limits = {"max_queued_requests": 4, "max_queued_tokens": bound, "max_model_len": 512, "longest_token": 8}
    mine, theirs = (kind(**limits).admit(ask, queue) for kind in (mounted_admission(admitting.Admission), BoundedQueue))
    assert (mine is None) == (theirs is None)
    if mine is not None:
        assert (mine.status, mine.param) == (theirs.status, theirs.param)
        assert (mine.retry_after_s is None) == (theirs.retry_after_s is None)


def test_times_are_those_of_the_load_client():
    for seed, how in enumerate(({}, {"late": True}, {"merged": True}, {"ones": True}, {"late": True, "merged": True})):
        requests = serving_times.schedule(seed, **how)
        stamps = [
            latency.Stamps(r["scheduled"], r["sent"], tuple(r["chunks"]), r["end"], status=r["status"])
            for r in requests
        ]  # fmt: skip
        due = [s.from_schedule() for s in stamps]
        got = serving_times.latencies(requests, serving_times.SLO)
        ok = [s for s in due if s.ok]
        assert got["ttft"] == [s.ttft for s in ok]
        assert got["e2e"] == [s.e2e for s in ok]
        assert got["itl"] == [gap for s in ok for gap in s.itl]
        assert got["tpot"] == [s.tpot for s in ok if s.tpot is not None]
        seconds = max(r["end"] for r in requests) - min(r["scheduled"] for r in requests)
        good = latency.goodput(due, latency.SLO(**serving_times.SLO), seconds)
        assert got["goodput"] == pytest.approx(good)


def test_a_fit_and_its_rate_are_those_of_the_roofline():
    for seed in range(8):
        samples = serving_times.measured(seed, 20, 0.2)
        a, b, rate = serving_times.capacity(samples, serving_times.MIX, 3)
        cost = capacity.fit(samples)
        assert (a, b) == pytest.approx((cost.a, cost.b))
        assert rate == pytest.approx(capacity.rate_limit(cost, serving_times.MIX, 3))


# In a live server


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """A random Qwen3 of 211 words."""
    folder = tmp_path_factory.mktemp("serving") / "model"
    shutil.copytree(tiny_folder("qwen3"), folder)
    Backend(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


SMALL = {"max_model_len": 64, "dtype": "float32", "device": "cpu", "num_kv_blocks": 12}
STOPPING = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop, include_stop_str_in_output=include,
                   min_tokens=least)
    for stop, include, least in (
        (" w", False, 0), (["1 w", "zz"], True, 0), ("5", False, 4), ([], False, 0), ("9", True, 12), ("w", False, 3),
    )
]  # fmt: skip


def answers(llm):
    prompts = [[5, 6], [7] * 20, [8], [9] * 33, [10, 11, 12], [3]]
    outputs = llm.generate(prompts, STOPPING, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


def test_the_stops_of_the_solution_end_the_same_texts(folder):
    mounted = load(f"{SOLUTION}:13.6")
    assert mounted.names == {"stops": "13.6 StreamStops"}
    expected = answers(LLM(folder, **SMALL))
    assert {reason for _, _, reason in expected} == {"stop", "length"}
    assert answers(LLM(folder, **SMALL, parts=mounted.parts)) == expected


@pytest.fixture(scope="module")
def served(folder):
    """The solution, mounted in a server with one place and room for one more. Its functions that were called, too."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("fastapi")
    from minillm.server.local import LocalServer

    mounted, seen = load(SOLUTION), set()

    def look(frame, event, _):
        if event == "call" and ".ipynb, code cell" in frame.f_code.co_filename:
            seen.add(frame.f_code.co_name)

    threading.setprofile(look)
    try:
        with (
            AsyncLLM(folder, **mounted.config(SMALL | {"max_num_seqs": 1}), parts=mounted.parts) as llm,
            LocalServer(llm, admission=mounted.server["admission"], max_queued_requests=1) as server,
            httpx.Client(base_url=server.url, timeout=600) as client,
        ):
            yield server, client, seen
    finally:
        threading.setprofile(None)


def completion(client, **more):
    body = {"prompt": [5, 6], "max_tokens": 40, "temperature": 0, "ignore_eos": True} | more
    return client.post("/v1/completions", json=body)


def test_the_live_server_refuses_with_429_and_says_when(served):
    """The engine stands still until four have their answer: who runs, who waits and who is late is no race."""
    server, client, seen = served
    core, go = server.state.llm.core, threading.Event()
    step = core.step
    core.step = lambda: (go.wait(600), step())[1]
    try:
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(completion, client) for _ in range(6)]
            early = [f.result().status_code for f in itertools.islice(as_completed(asked, 600), 4)]
            go.set()
            said = [f.result(600) for f in asked]
    finally:
        go.set()
        core.step = step
    assert early == [429] * 4
    assert sorted(r.status_code for r in said) == [200, 200, 429, 429, 429, 429]
    no = [r for r in said if r.status_code == 429]
    assert all(int(r.headers["Retry-After"]) >= 1 for r in no)
    error = no[0].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert error["message"].startswith("the queue is full: 1 wait; try again in")
    assert {"admit", "wait"} <= seen


def test_what_cannot_fit_is_400_and_names_the_prompt(served):
    _, client, _ = served
    said = completion(client, prompt=[5] * 64)
    assert (said.status_code, said.json()["error"]["param"]) == (400, "prompt")
    assert "Retry-After" not in said.headers


@pytest.mark.parametrize("stream", [False, True])
def test_the_live_server_stops_at_a_stop_string(served, stream):
    _, client, seen = served
    whole = completion(client).json()["choices"][0]["text"]
    words = whole.split(" ")
    stop = f"{words[5]} {words[6][:2]}"
    assert 0 < whole.find(stop) < len(whole) - len(stop)
    said = completion(client, stop=[stop, "never"], stream=stream)
    if stream:
        events = [line.removeprefix("data: ") for line in said.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
    else:
        choices = said.json()["choices"]
    assert "".join(c["text"] for c in choices) == whole[: whole.find(stop)]
    assert choices[-1]["finish_reason"] == "stop"
    assert {"feed", "finish"} <= seen


# What is wrong is said


def changed(tmp_path, old, new):
    nb = nbk.read(SOLUTION)
    cell = next(cell for cell in nbk.code_cells(nb) if old in nbk.source(cell))
    cell["source"] = nbk.source(cell).replace(old, new)
    nbk.write(tmp_path / SOLUTION.name, nb)
    return tmp_path / SOLUTION.name


NONSENSE = [  # returned by admit, what the client is told
    ("7", "Admission.admit must return None or (status, message, retry_after_s), got 7"),
    ("(429, 'no')", "Admission.admit must return None or"),
    ("(200, 'the status is no refusal', 1.0)", "a Refusal's status must be from 400 to 599, got 200"),
    ("(429, '', 1.0)", "a Refusal's message must say why"),
    ("(429, 'too many are here', -1.0)", "a Refusal's retry_after_s must be seconds, 0 or more"),
    ("1 / 0", "it raised ZeroDivisionError"),
]


@pytest.mark.parametrize(("returned", "words"), NONSENSE)
def test_an_admission_that_returns_nonsense_is_500_in_words(tmp_path, returned, words):
    path = changed(tmp_path, "        prompt, wait = ", f"        return {returned}\n        prompt, wait = ")
    part = load(f"{path}:13.5").server["admission"](4, None, max_model_len=64)
    said = judged_admit(part, Ask(prompt_tokens=3, max_tokens=3), Queue())
    assert isinstance(said, Refusal)
    assert said.status == 500
    assert words in said.message


def test_stops_that_return_nonsense_are_an_error_in_words(tmp_path, folder):
    path = changed(tmp_path, "        return out\n", "        return None\n")
    llm = LLM(folder, **SMALL, parts=load(f"{path}:13.6").parts)
    with pytest.raises(MinillmError, match=r"StreamStops\.feed must return text, got None"):
        answers(llm)
    path = changed(tmp_path, "self.matched = max(done, key=len)", "self.matched = 'something else'")
    llm = LLM(folder, **SMALL, parts=load(f"{path}:13.6").parts)
    with pytest.raises(MinillmError, match=r"StreamStops\.matched is 'something else'; expected None or one of"):
        answers(llm)


CHANGED = [
    ("admit(self, ask: dict, queue: dict)", "admit(self, ask: dict)", r"13\.5 Admission\.admit is called with 2"),
    ("feed(self, text: str, enabled: bool = True)", "feed(self, text: str)", r"13\.6 StreamStops\.feed is called"),
]


@pytest.mark.parametrize(("old", "new", "words"), CHANGED)
def test_a_signature_that_was_changed_is_named(tmp_path, old, new, words):
    with pytest.raises(MinillmError, match=words):
        load(changed(tmp_path, old, new))


def test_without_bounds_the_learner_sees_numbers_all_the_same():
    """No token bound and no longest token are bounds that nothing reaches."""
    seen = []

    class Mine(admitting.Admission):
        def admit(self, ask, queue):
            seen.append((ask, queue, self.max_waiting_tokens, self.longest_token))
            return super().admit(ask, queue)

    part = mounted_admission(Mine)(1, None, max_model_len=64)
    assert part.admit(Ask(prompt_bytes=10_000), Queue(running=1, running_left=(3.0,))) is None
    ask, queue, tokens, longest = seen[0]
    assert (ask["max_tokens"], ask["prompt_bytes"], queue["step_s"], queue["prefill_s"]) == (64, 0, None, 0.0)
    assert math.isfinite(tokens)
    assert math.isfinite(longest)


def test_a_fresh_exercise_has_nothing_to_mount():
    with pytest.raises(
        MinillmError, match=r"nothing to mount: 13\.5 Admission is not written yet \(wait, admit\); 13\.6"
    ):
        load(SOLUTION.parents[1] / "exercises" / SOLUTION.name)


def test_without_stops_text_passes_by():
    made = []
    part = mounted_stops(lambda *a: made.append(a))([], False)
    assert [part.feed("a", False), part.feed("b"), part.finish(), part.matched] == ["a", "b", "", None]
    assert made == []
