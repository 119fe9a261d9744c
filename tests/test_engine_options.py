"""Every option of an engine does what it says, seen from `LLM`; one that nothing would read is refused in words."""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import LLM, EngineConfig, MinillmError, SamplingParams
from minillm.attention.paged import PagedReference, PagedSDPA
from minillm.cache.build import make_namespace
from minillm.cache.namespace import Namespace
from minillm.cache.prefix import RadixPrefixCache
from minillm.errors import RequestError
from minillm.parts import OwnAttention, check_parts
from minillm.policy import FirstCome, Priority
from minillm.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = {"num_kv_blocks": 24, "max_model_len": 96, "dtype": "float32"}
LONG = [(7 * i) % 211 for i in range(40)]  # two whole blocks, and a half
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """A random Qwen3 of 211 words."""
    folder = tmp_path_factory.mktemp("options") / "model"
    shutil.copytree(tiny_folder("qwen3"), folder)
    Backend(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def make(folder):
    return lambda **options: LLM(folder, **(SMALL | options))


def ask(llm, prompts, params=GREEDY, **whose):
    return llm.generate(prompts, params, use_tqdm=False, **whose)


def tokens(results):
    return [o.token_ids for r in results for o in r.outputs]


def forwarded(llm, request_id):
    """Tokens that the engine's steps computed for a request."""
    return sum(n for e in llm.engine.events.of("step") for name, n, _ in e.data["rows"] if name == request_id)


# What is accepted is honoured -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", ["radix", "hash"])
def test_a_tenant_finds_its_own_prefix_and_nobody_elses(make, prefix_cache):
    llm = make(enable_prefix_caching=True, prefix_cache=prefix_cache)
    want = tokens(ask(make(), LONG))
    first, other, again = (ask(llm, LONG, tenant=t)[0] for t in ("ann", "bob", "ann"))
    assert tokens([first, other, again]) == want * 3
    whole = len(LONG) + GREEDY.max_tokens - 1
    assert [forwarded(llm, r.request_id) for r in (first, other, again)] == [whole, whole, whole - 32]
    assert [(e.request_id, e.data["tokens"]) for e in llm.engine.events.of("hit")] == [(again.request_id, 32)]


@pytest.mark.parametrize("form", [LONG, " ".join(f"w{t}" for t in LONG)])
def test_a_public_prefix_is_shared_and_what_follows_is_not(make, form, folder, tmp_path):
    """40 public tokens are two whole blocks; the third block belongs to its tenant though the tokens are the same."""
    from tokenizers import pre_tokenizers

    copy = shutil.copytree(folder, tmp_path / "words")
    spoken = Backend(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0"))
    spoken.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    spoken.save(str(copy / "tokenizer.json"))
    llm = LLM(copy, **SMALL, enable_prefix_caching=True, public_prefixes=[form])
    prompt = LONG + list(range(20))
    results = [ask(llm, prompt, tenant=t)[0] for t in ("ann", "bob", "ann")]
    whole = len(prompt) + GREEDY.max_tokens - 1
    assert [forwarded(llm, r.request_id) for r in results] == [whole, whole - 32, whole - 48]
    assert len({tuple(t) for t in tokens(results)}) == 1


@pytest.mark.parametrize("floors", [{}, {"ann": 3}])
def test_a_floor_keeps_a_tenants_blocks_from_others(make, floors):
    llm = make(num_kv_blocks=8, max_num_seqs=1, enable_prefix_caching=True, cache_floors=floors, watermark=0)
    ask(llm, LONG, tenant="ann")
    for i in range(4):
        ask(llm, [100 + i] * 60, tenant="bob")
    again = ask(llm, LONG, tenant="ann")[0]
    hit = [e.data["tokens"] for e in llm.engine.events.of("hit") if e.request_id == again.request_id]
    assert hit == ([32] if floors else [])
    llm.engine.cache.check()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline"])
def test_the_policy_decides_who_is_served_first(make, policy):
    llm = make(scheduling_policy=policy, max_num_seqs=1)
    whose = {"priority": {"priority": [0, 5, -5]}, "deadline": {"deadline_s": [500, 900, 100]}, "fcfs": {}}[policy]
    results = ask(llm, [[5], [6], [7]], **whose)
    order = [e.request_id for e in llm.engine.events.of("first_token")]
    ids = [r.request_id for r in results]
    assert order == (ids if policy == "fcfs" else [ids[2], ids[0], ids[1]])


def test_ageing_makes_up_for_priority(make):
    """A step of priority is worth so many seconds: next to nothing here, so the order of arrival stays."""
    llm = make(scheduling_policy="priority", priority_ageing_s=1e-9, max_num_seqs=1)
    results = ask(llm, [[5], [6], [7]], priority=[5, 0, -5])
    assert [e.request_id for e in llm.engine.events.of("first_token")] == [r.request_id for r in results]


def test_batch_invariant_requests_are_the_same_to_the_bit_beside_others_and_after_preemption(make):
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True, logprobs=3)
    prompts = [LONG[:n] for n in (9, 30, 17, 25)]
    options = {"batch_invariant": True, "watermark": 0, "max_num_batched_tokens": 24}
    alone = make(**options)
    want = [ask(alone, p, params)[0].outputs[0] for p in prompts]
    assert not alone.engine.events.of("preempted")
    crowded = make(**options, num_kv_blocks=7)
    got = [r.outputs[0] for r in ask(crowded, prompts, params)]
    assert crowded.engine.events.of("preempted")
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert [o.logprobs for o in got] == [o.logprobs for o in want]  # floats, compared exactly
    crowded.engine.cache.check()

    # The comparison sees a rounding that depends on the company: the same with the logits off by a last bit.
    forward = crowded.engine.runner.forward
    nudged = lambda requests, counts: forward(requests, counts) * (1 + 2**-23 * (len(requests) > 1))
    crowded.engine.runner.forward = nudged
    off = [r.outputs[0] for r in ask(crowded, prompts, params)]
    assert [o.logprobs for o in off] != [o.logprobs for o in want]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("prefix", [False, True])
def test_swapped_blocks_come_back_and_the_tokens_are_the_same(make, tmp_path, tier, prefix):
    params = GREEDY.replace(max_tokens=24)
    prompts = [[i, *LONG[:n]] for i, n in enumerate((9, 30, 17, 25))]
    want = [tokens(ask(make(), p, params))[0] for p in prompts]
    where = {"kv_host_bytes": MIB} if tier == "host" else {"kv_disk_bytes": MIB, "kv_disk_path": str(tmp_path / "kv")}
    llm = make(preemption_mode="swap", num_kv_blocks=7, watermark=0, enable_prefix_caching=prefix, **where)
    results = ask(llm, prompts, params)
    assert tokens(results) == want
    assert ("cached" if prefix else "swap") in [e.data["how"] for e in llm.engine.events.of("preempted")]
    assert any(e.data["source"] == tier for e in llm.engine.events.of("hit"))
    computed = sum(forwarded(llm, r.request_id) for r in results)
    found = sum(e.data["tokens"] for e in llm.engine.events.of("hit"))
    lost = sum(e.data["computed"] for e in llm.engine.events.of("preempted"))
    assert computed == sum(len(p) + 23 for p in prompts) + lost - found  # what came back was not computed again
    llm.engine.cache.check()


def test_a_disk_serves_a_later_engine_of_the_same_kind_only(make, tmp_path):
    def build(**more):
        disk = {"kv_disk_bytes": MIB, "kv_disk_path": str(tmp_path / "kv"), "preemption_mode": "swap"}
        return make(enable_prefix_caching=True, **(disk | {"num_kv_blocks": 8, "max_num_seqs": 1} | more))

    def used(llm):
        result = ask(llm, LONG)[0]
        hits = [e.data["tokens"] for e in llm.engine.events.of("hit") if e.request_id == result.request_id]
        for i in range(4):  # what it left is evicted, so written
            ask(llm, [100 + i] * 60)
        llm.engine.cache.tiers.close()
        return hits, result.outputs[0].token_ids

    (none, want), (found, same), (other, close) = (
        used(build(**more)) for more in ({}, {}, {"attention_backend": "reference"})
    )
    assert (none, found, other) == ([], [32], [])
    assert same == want == close


# What a faulty policy does to its request, and to nobody else ----------------------------------------------------


class BadKey(FirstCome):
    def __init__(self, key):
        self.wrong = key

    def key(self, request):
        return self.wrong if request.tenant == "bad" else super().key(request)


@pytest.mark.parametrize("key", [None, float("nan"), float("inf"), "1", (1, 2), True, 10**400])
def test_a_key_that_is_no_number_ends_its_request_in_words(make, key):
    llm = make(parts={"policy": BadKey(key)})
    good = llm.stream([5, 6], GREEDY)
    text = next(good)
    with pytest.raises(MinillmError, match="parts: the policy's key"):
        ask(llm, [[5], [6]], tenant=["", "bad"])
    assert [text + "".join(good)] == ["".join(make().stream([5, 6], GREEDY))]
    llm.engine.cache.check()
    assert llm.engine.cache.num_live == 0


class BadVictim(FirstCome):
    def __init__(self, victim):
        self.wrong = victim

    def victim(self, running):
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong


@pytest.mark.parametrize("victim", [None, 5, "request", ZeroDivisionError("mine")])
def test_a_victim_that_is_no_candidate_ends_the_request_that_needed_one(make, victim):
    llm = make(parts={"policy": BadVictim(victim)}, num_kv_blocks=4, watermark=0)
    params, prompts = GREEDY.replace(max_tokens=20), [LONG[:30], LONG[:28]]
    requests = [llm.engine.make_request(p, params) for p in prompts]
    core = llm.engine.core
    for r in requests:
        core.add(r)
    while core.has_work:
        core.step()
    assert sorted(r.finish_reason for r in requests) == ["error", "length"]
    failed, done = sorted(requests, key=lambda r: r.finish_reason)
    assert ("mine" if isinstance(victim, Exception) else "parts: the policy's victim") in failed.stop_reason
    assert [done.output_token_ids] == tokens(ask(make(), [done.prompt_token_ids], params))
    llm.engine.cache.check()


class Door(FirstCome):
    def __init__(self, answer):
        self.answer, self.loads = answer, []

    def admit(self, request, load):
        self.loads.append(load)
        return self.answer


def test_the_policys_refusal_is_logged_and_anything_but_words_is_a_fault(make):
    llm = make(parts={"policy": Door("too many of us")})
    with pytest.raises(RequestError, match="too many of us"):
        ask(llm, [5])
    (event,) = llm.engine.events.of("refused")
    assert event.data == {"field": "request", "reason": "request: too many of us"}
    for answer in (5, True, ["no"]):
        with pytest.raises(MinillmError, match="parts: the policy's admit"):
            ask(make(parts={"policy": Door(answer)}), [5])


def test_a_policy_sees_what_its_requests_tenant_could_get(make):
    policy = Door(None)
    llm = make(parts={"policy": policy}, num_kv_blocks=8, enable_prefix_caching=True, cache_floors={"ann": 3})
    ask(llm, LONG, tenant="ann")
    for tenant in ("ann", "bob"):
        ask(llm, [5], tenant=tenant)
    assert [load.free_blocks for load in policy.loads] == [8, 8, 6]  # two of ann's are cached, and she keeps them
    assert {load.total_blocks for load in policy.loads} == {8}


# What nothing would read is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preemption_mode": "recompute", "kv_host_bytes": MIB}, "kv_host_bytes"),
        ({"preemption_mode": "recompute", "kv_disk_bytes": MIB, "kv_disk_path": "x"}, "kv_disk_bytes"),
        ({"batch_invariant": True, "attention_backend": "torch"}, "attention of its own"),
        ({"batch_invariant": True, "attention_backend": "triton"}, "attention of its own"),
        ({"preemption_mode": "swap"}, "a place to swap to"),
        ({"kv_disk_bytes": MIB}, "belong together"),
        ({"kv_disk_path": "x"}, "belong together"),
        ({"priority_ageing_s": 5.0}, "scheduling_policy='priority'"),
        ({"prefix_cache": "hash"}, "enable_prefix_caching=True"),
        ({"cache_floors": {"a": 1}}, "enable_prefix_caching=True"),
        ({"public_prefixes": [[1]]}, "enable_prefix_caching=True"),
        *[({"batching": "static", name: value}, "batching='continuous'") for name, value in (
            ("enable_prefix_caching", True), ("enable_chunked_prefill", False), ("scheduling_policy", "priority"),
            ("watermark", 0), ("preemption_mode", "recompute"), ("kv_host_bytes", MIB), ("max_num_batched_tokens", 64),
        )],
        *[({"kv_cache": cache, name: value}, f"{name} belongs to kv_cache='paged'")
          for cache in ("contiguous", "none") for name, value in (
            ("attention_backend", "torch"), ("block_size", 32), ("num_kv_blocks", 8), ("kv_cache_dtype", "int8"),
            ("enforce_eager", True), ("enable_prefix_caching", True), ("kv_host_bytes", MIB), ("batch_invariant", True),
        )],
        ({"kv_cache": "contiguous", "batching": "continuous"}, "needs kv_cache='paged'"),
    ],
)  # fmt: skip
def test_an_option_that_would_be_ignored_is_refused(options, words):
    with pytest.raises(MinillmError, match=words):
        EngineConfig(**options)


def test_tiers_behind_a_prefix_cache_are_read_though_nobody_is_swapped_out():
    EngineConfig(preemption_mode="recompute", kv_host_bytes=MIB, enable_prefix_caching=True)


class NoForwardNeeded:
    def __init__(self, pool):
        pass

    plan = write = forward = lambda self, *_: None


@pytest.mark.parametrize(
    ("parts", "options", "words"),
    [
        ({"prefix_cache": RadixPrefixCache}, {"enable_prefix_caching": True, "prefix_cache": "hash"}, "'hash'"),
        ({"policy": FirstCome()}, {"scheduling_policy": "priority"}, "scheduling_policy='priority'"),
        ({"policy": FirstCome()}, {"scheduling_policy": "deadline"}, "scheduling_policy='deadline'"),
        ({"policy": FirstCome()}, {"scheduling_policy": "priority", "priority_ageing_s": 3}, "scheduling_policy"),
        ({"attention": NoForwardNeeded}, {"kv_disk_bytes": MIB, "kv_disk_path": "x"}, "kv_disk_path"),
        ({"attention": NoForwardNeeded}, {"batch_invariant": True}, "attention of its own"),
        ({"policy": FirstCome()}, {"batching": "static"}, "batching='continuous'"),
        ({"scheduler": Scheduler}, {"kv_cache": "none"}, "batching='continuous'"),
    ],
)  # fmt: skip
def test_a_part_beside_the_option_that_it_replaces_is_refused(parts, options, words):
    with pytest.raises(MinillmError, match=words):
        check_parts(parts, EngineConfig(**options))


class NoQueue:
    """A learner's scheduler whose queue is a plain list."""

    def __init__(self, *arguments):
        self._inner = Scheduler(*arguments)
        self.add, self.schedule, self.finish = self._inner.add, self._inner.schedule, self._inner.finish
        self.waiting: list = []

    running = property(lambda self: self._inner.running)
    num_waiting = property(lambda self: self._inner.num_waiting)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "priority"), ({"scheduling_policy": "deadline"}, "priority"), ({"batching": "static"}, "priority"),
        ({"kv_cache": "none"}, "priority"), ({"batching": "static"}, "deadline_s"),
        ({"kv_cache": "none"}, "deadline_s"), ({"parts": {"scheduler": NoQueue}}, "deadline_s"),
    ],
)  # fmt: skip
def test_what_a_request_asks_in_vain_is_refused_on_every_face(make, options, field):
    llm = make(**({"num_kv_blocks": None} if "kv_cache" in options else {}) | options)
    value = {"priority": 1, "deadline_s": 5.0}[field]
    for call in (lambda: ask(llm, [5], **{field: value}), lambda: llm.stream([5], GREEDY, **{field: value})):
        with pytest.raises(RequestError) as error:
            call()
        assert error.value.field == field
    assert [e.data["field"] for e in llm.engine.events.of("refused")] == [field, field]
    assert ask(llm, [5])


def without(name):
    def make(*arguments):
        scheduler = NoQueue(*arguments)
        setattr(scheduler, name, None)
        return scheduler

    return make


@pytest.mark.parametrize("name", ["add", "schedule", "finish"])
def test_a_scheduler_that_lacks_what_a_step_calls_is_refused_at_the_start(make, name):
    with pytest.raises(MinillmError, match=f"parts: the scheduler needs a method {name}"):
        make(parts={"scheduler": without(name)})


@pytest.mark.parametrize("name", ["num_waiting", "running"])
def test_a_scheduler_whose_counts_are_none_is_refused_at_the_start(make, name, monkeypatch):
    monkeypatch.setattr(NoQueue, name, None)
    with pytest.raises(MinillmError, match=f"parts: the scheduler's {name} must be"):
        make(parts={"scheduler": NoQueue})


@pytest.mark.parametrize(
    "options",
    [{"scheduling_policy": "priority"}, {"parts": {"policy": Priority()}}, {"parts": {"scheduler": Scheduler}}],
)
def test_a_priority_that_somebody_may_read_is_taken(make, options):
    assert ask(make(**options), [5], priority=1)


def test_what_a_request_asks_reaches_the_engine_from_every_face(make, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "chat")
    (copy / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    llm = LLM(copy, **SMALL, scheduling_policy="priority")
    whose = {"priority": 3, "tenant": "ann", "deadline_s": 60.0}
    talk = [{"role": "user", "content": "w5"}]
    ask(llm, [5], **whose)
    llm.chat(talk, GREEDY, use_tqdm=False, **whose)
    "".join(llm.stream([5], GREEDY, **whose))
    several = {"priority": [3, 4], "tenant": ["ann", "bob"], "deadline_s": [None, 60.0]}
    llm.chat([talk, talk], GREEDY, use_tqdm=False, **several)
    queued = [(e.data["priority"], e.data["tenant"]) for e in llm.engine.events.of("queued")]
    assert queued == [(3, "ann")] * 4 + [(4, "bob")]


def test_who_waits_past_its_deadline_never_begins(make):
    llm = make(max_num_seqs=1)
    first, late = ask(llm, [[5], [6]], deadline_s=[None, 1e-6])
    assert first.outputs[0].finish_reason == "length"
    assert (late.outputs[0].finish_reason, late.outputs[0].token_ids) == ("abort", [])
    assert "".join(llm.stream([6], GREEDY, deadline_s=1e-6)) == ""


def test_a_refused_request_takes_no_seed(make):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    llm = make(seed=3)
    with pytest.raises(RequestError):
        ask(llm, [5], priority=1)
    assert tokens(ask(llm, [5], params)) == tokens(ask(make(seed=3), [5], params))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[({"public_prefixes": value}, "public_prefixes") for value in ("hello", [5], [None], [b"x"], [[1.5] * 16],
          [[211] * 16], [[-1] * 16], [[True] * 16], [["w"] * 16], [[[1]] * 16], 5, {"a": 1}, [{1: 2}])],
        *[({"kv_disk_bytes": MIB, "kv_disk_path": value}, "kv_disk_path") for value in (5, b"x", ["x"], "", True)],
        ({"kv_host_bytes": 1 << 60}, "kv_host_bytes"),
        *[({"kv_host_bytes": value}, "kv_host_bytes") for value in (-1, 1.5, "1GB", True, None)],
        ({"cache_floors": {"a": 24}}, "cache_floors"), ({"cache_floors": {"a": -1}}, "cache_floors"),
        ({"public_prefixes": [[1] * 15]}, "shorter than a block"),
    ],
)  # fmt: skip
def test_an_option_of_the_wrong_kind_is_refused_in_words(make, options, words):
    with pytest.raises(MinillmError, match=words):
        make(enable_prefix_caching=True, **options)


@pytest.mark.parametrize("field", ["priority", "tenant", "deadline_s"])
@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, b"x", object()])
def test_one_for_all_or_a_list_with_one_for_each(make, field, value):
    with pytest.raises(RequestError, match=f"^{field}: "):
        ask(make(), [[5]], **{field: value})


# What must be the same for KV to mean the same --------------------------------------------------------------------


def test_what_computes_kv_is_part_of_its_name(make, monkeypatch):
    engine = make().engine
    model, tokenizer, pool = engine.model, engine.tokenizer, engine.cache.pool

    def name(attention, weights="w", **options):
        return make_namespace(model, tokenizer, EngineConfig(**options), attention, weights)

    own = lambda: OwnAttention(NoForwardNeeded(pool), 2)
    base = name(PagedSDPA(pool))
    assert base == name(PagedSDPA(pool)) == name(PagedSDPA(pool), attention_backend="torch")  # "auto" is torch here
    others = [name(PagedReference(pool)), name(own()), name(own()), name(PagedSDPA(pool), weights=""),
              name(PagedSDPA(pool), weights=""), name(PagedSDPA(pool), weights="v")]  # fmt: skip
    monkeypatch.setattr(torch, "__version__", "0.0")
    others.append(name(PagedSDPA(pool)))
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    others.append(name(PagedSDPA(pool)))
    monkeypatch.setattr(model, "ops", object())
    others.append(name(PagedSDPA(pool)))
    assert all(a != b for a, b in itertools.combinations([base, *others], 2))
    assert Namespace(base).adapter == ""


def test_an_engine_says_under_which_name_it_keeps_kv(make):
    named = lambda **options: make(enable_prefix_caching=True, **options).engine.cache.engine_namespace
    name = named()
    assert name == named()
    assert len({name, named(kv_cache_dtype="int8"), named(block_size=32), named(attention_backend="reference")}) == 4
