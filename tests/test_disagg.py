"""Prefill and decode on two engines: the same tokens as on one, whatever layout, and what each side counts."""

from __future__ import annotations

import asyncio
import threading

import pytest
from disagg_pair import GREEDY, PROMPT, SEEDED, Split, alone, save_words, splits, until

from minillm import AsyncLLM, MinillmError, SamplingParams
from minillm.cluster import exporter, frame
from minillm.cluster.disagg import layout_of
from minillm.cluster.remote_prefill import RemotePrefill


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return save_words(tiny_folder, tmp_path_factory)


@pytest.fixture
def make(folder):
    with splits(folder) as build:
        yield build


PROMPTS = [PROMPT, PROMPT[:37], [9] * 65, [10, 11, 12], PROMPT[:33] + [3] * 60]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"max_num_batched_tokens": 19}, {"d": {"block_size": 32}}, {"p": {"block_size": 32}},
        {"kv_cache_dtype": "int8"}, {"enable_prefix_caching": True}, {"p": {"num_kv_blocks": 7, "max_model_len": 96}},
    ],
    ids=["plain", "chunks", "blocks of 16 to 32", "blocks of 32 to 16", "int8", "prefix cache", "crowded"],
)  # fmt: skip
def test_the_tokens_are_those_of_one_engine(make, folder, options, params):
    shared = {k: v for k, v in options.items() if k not in ("p", "d")}
    want = alone(folder, PROMPTS, params, **shared)
    split = make(**options)

    async def all_at_once():
        """D hears of all of them before anything of one has come, which a prefix cache would give to another."""

        async def one(prompt):
            return [o async for o in split.d.generate(prompt, params)][-1].outputs[0].token_ids

        inside, gate = threading.Event(), threading.Event()
        split.d.call(lambda: (inside.set(), gate.wait()))
        try:
            await asyncio.to_thread(inside.wait)
            tasks = [asyncio.create_task(one(prompt)) for prompt in PROMPTS]
            while split.d._commands.qsize() < len(PROMPTS):
                await asyncio.sleep(0.001)
        finally:
            gate.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(all_at_once()) == want
    assert split.outcomes == {("loaded", ""): 4}, "the short one is computed at once"
    split.settled()


def test_what_was_transferred_is_not_computed_again(make):
    split = make()
    rows = []
    split.d.engine.events.subscribe(lambda e: rows.append(e) if e.kind in ("step", "hit") else None)
    split.tokens()
    split.settled()
    assert [(e.data["tokens"], e.data["source"]) for e in rows if e.kind == "hit"] == [(64, "transfer")]
    assert [row[1:] for row in next(e for e in rows if e.kind == "step").data["rows"]] == [(5, 64)]
    assert split.remote.stats.bytes == 64 * split.remote.layout.token_bytes == split.worker.stats.bytes
    assert dict(split.worker.stats.outcomes) == {("acked", ""): 1}


def test_the_terms_of_a_transfer_are_in_the_log(make):
    split = make()
    split.tokens()
    split.settled()
    (event,) = split.d.engine.events.of("transfer")
    terms = {name: event.data.pop(name) for name in list(event.data) if name.endswith("_s")}
    size = 64 * split.remote.layout.token_bytes
    assert event.data == {"outcome": "loaded", "reason": "", "bytes": size, "tokens": 64}
    assert set(terms) == {"queue_s", "allocate_s", "transfer_s", "layout_s", "exposed_s"}
    assert all(0 <= s < 60 for s in terms.values())
    assert terms["transfer_s"] >= terms["layout_s"] > 0


def test_layers_go_out_while_later_ones_are_computed(make):
    split = make()
    said = []
    forward, say = split.worker.exporter.runner.attention.inner.forward, split.wires[0][0]._channel.send

    def computed(layer, q, plan):
        said.append(f"compute {layer}")
        return forward(layer, q, plan)

    split.worker.exporter.runner.attention.inner.forward = computed
    peer = next(iter(split.worker.peers))
    link_say = peer.link.say
    peer.link.say = lambda message, *rest, **options: (
        said.append(message["kind"]),
        link_say(message, *rest, **options),
    )

    # P's step waits after its first layer until D has given room: then the second layer's piece is sent at once.
    def slow(layer):
        if layer == 0:
            job = next(iter(peer.jobs.values()))
            until(lambda: job.machine.state == "sending")

    after = split.worker.exporter._after_layer
    split.worker.exporter.runner.attention.after = lambda layer: (after(layer), slow(layer))
    split.tokens()
    split.settled()
    assert said[:2] == ["reserve", "compute 0"]
    assert said.index("piece") < said.index("compute 2")
    assert said[-1] == "done"
    assert say is not None


def test_tokens_of_the_prefill_engines_prefix_cache_are_sent_too(make):
    split = make(p={"enable_prefix_caching": True})
    first = split.tokens()
    rows = []
    split.p.engine.events.subscribe(lambda e: rows.append(e) if e.kind == "step" else None)
    again = split.generate()
    assert again.outputs[0].token_ids == first
    assert split.d.engine.events.of("hit")[-1].data == {"tokens": 64, "source": "transfer", "cached": 48}
    assert again.num_cached_tokens == 48, "what P did not compute for it either; a hit leaves a token to compute"
    assert rows[0].data["rows"][0][1:] == (16, 48)
    assert split.outcomes == {("loaded", ""): 2}
    split.settled()


def test_a_long_hit_travels_in_pieces_that_a_message_can_carry(make, folder, monkeypatch):
    """All of it goes out with the first chunk, and a message that is too large would end the channel."""
    split = make(p={"enable_prefix_caching": True})
    first = split.tokens()
    token = split.remote.layout.token_bytes // split.remote.layout.num_layers
    monkeypatch.setattr(frame, "MAX_PAYLOAD_BYTES", 20 * token)
    monkeypatch.setattr(exporter, "MAX_PIECE_BYTES", 20 * token)
    assert split.tokens() == first
    assert split.outcomes == {("loaded", ""): 2}
    assert split.remote.stats.bytes == split.worker.stats.bytes
    split.settled()


def test_what_decode_has_in_its_own_prefix_cache_is_not_sent_for(make):
    split = make(enable_prefix_caching=True)
    assert split.tokens() == split.tokens()
    assert split.outcomes == {("loaded", ""): 1}
    split.settled()


def test_several_completions_of_a_prompt(make, folder):
    params = SEEDED.replace(n=3)
    split = make(enable_prefix_caching=True)
    got = [o.token_ids for o in split.generate(params=params).outputs]
    assert got == [alone(folder, [PROMPT], SEEDED.replace(seed=11 + i))[0] for i in range(3)]
    assert split.outcomes == {("loaded", ""): 1}, "sent once"
    hits = [(e.data["source"], e.data["tokens"]) for e in split.d.engine.events.of("hit")]
    assert hits == [("transfer", 64), ("prefix", 64), ("prefix", 64)]
    split.settled()


def test_tenants_do_not_share_the_prefill_engines_cache(make):
    split = make(p={"enable_prefix_caching": True})
    split.generate(tenant="a")
    assert split.generate(tenant="b").num_cached_tokens == 0
    assert split.generate(tenant="a").num_cached_tokens == 48
    split.settled()


def test_priority_is_heard_where_the_other_engine_reads_it(make):
    for options in ({}, {"scheduling_policy": "priority"}):
        split = make(d={"scheduling_policy": "priority"}, p=options)
        split.generate(priority=-3)
        assert split.outcomes == {("loaded", ""): 1}
        split.settled()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_dtype int8 there, auto here"),
        ({"dtype": "bfloat16"}, "dtype bfloat16 there, float32 here"),
        ({"quantization": "int8"}, "another model"),
        ({"attention_backend": "reference"}, "another model"),
    ],
)
def test_a_layout_that_means_something_else_is_refused_in_words_and_computed_here(folder, caplog, options, words):
    split = Split(folder, p=options)
    try:
        until(lambda: split.remote.states()["refused"] == 1)
        until(lambda: words in caplog.text)  # it is said after that
        assert split.tokens() == alone(folder, [PROMPT], GREEDY)[0]
        assert split.outcomes == {}
        split.settled()
    finally:
        split.close()


def test_the_prefill_engine_refuses_another_layout_as_well(make):
    """A decode engine that does not look at what P says."""
    split = make()
    split.remote.layout = layout_of(split.d.engine).__class__.from_dict(
        split.remote.layout.to_dict() | {"model": "other"}
    )
    assert len(split.tokens()) == 6
    assert split.outcomes == {("recompute", "refused"): 1}
    assert dict(split.worker.stats.outcomes) == {("refused", "door"): 1}
    split.settled()


def test_the_least_loaded_prefill_engine_is_chosen(make):
    split = make()
    split.remote.add_peer("busy", split.connect)
    until(lambda: split.remote.states()["ready"] == 2)
    split.remote.peers["p"].tokens += 1000
    assert split.remote._choose() is split.remote.peers["busy"]
    split.remote.peers["p"].tokens -= 1000
    with pytest.raises(MinillmError, match="already"):
        split.remote.add_peer("busy", split.connect)
    split.remote.remove_peer("busy")
    assert list(split.remote.peers) == ["p"]


def test_the_clients_of_the_prefill_engine_are_not_disturbed(make, folder):
    split = make()

    async def both():
        async def last(llm, params):
            return [o async for o in llm.generate(PROMPT, params)][-1].outputs[0].token_ids

        long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        return await asyncio.gather(last(split.p, long), last(split.d, GREEDY))

    own, other = asyncio.run(both())
    assert other == own[:6]
    assert len(own) == 40
    split.settled()


def test_an_engine_without_a_paged_cache_is_refused(folder):
    from minillm import LLM

    with pytest.raises(MinillmError, match="kv_cache='paged'"):
        layout_of(LLM(folder, kv_cache="none", dtype="float32").engine)
    llm = AsyncLLM(folder, dtype="float32", num_kv_blocks=8, max_model_len=64)
    with pytest.raises(MinillmError, match="lease_s"):
        RemotePrefill(llm, lease_s=0)
    llm.shutdown()
