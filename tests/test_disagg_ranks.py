"""A split whose engines are spread over ranks: KV leaves and enters in whole blocks, and is laid out anew."""

from __future__ import annotations

import asyncio
import shutil
from types import SimpleNamespace

import pytest
from conftest import tiny_hf
from disagg_pair import GREEDY, PROMPT, SEEDED, SMALL, Split, alone, save_words, until
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import AsyncLLM
from minillm.cache.pool import KVPool
from minillm.cluster.prefill_worker import PrefillWorker
from minillm.cluster.remote_prefill import RemotePrefill
from minillm.cluster.transport import connect, listen


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 19}, {"kv_cache_dtype": "int8"}, {"d": {"block_size": 32}}]
)
def test_a_pool_that_only_knows_whole_blocks(tiny_folder, tmp_path_factory, monkeypatch, options):
    """What a pool over ranks offers, of one process: read_blocks and write_blocks."""
    folder = save_words(tiny_folder, tmp_path_factory)
    want = alone(folder, [PROMPT], SEEDED, **{k: v for k, v in options.items() if k != "d"})
    for module in ("exporter", "importer"):
        monkeypatch.setattr(f"minillm.cluster.{module}.KVPool", type("Another", (), {}))
    monkeypatch.setattr(KVPool, "config", SimpleNamespace(num_layers=3), raising=False)
    for name in ("read_tokens", "write_tokens"):
        monkeypatch.delattr(KVPool, name)
    split = Split(folder, **options).ready()
    try:
        assert [split.tokens(PROMPT, SEEDED)] == want
        assert split.outcomes == {("loaded", ""): 1}
        split.settled()
    finally:
        split.close()


def test_engines_of_one_and_of_two_ranks_hand_over_to_each_other(tmp_path):
    folder = tmp_path / "model"
    tiny_hf("qwen3", vocab_size=212).save_pretrained(folder)
    Backend(models.WordLevel({f"w{i}": i for i in range(212)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    want = alone(folder, [PROMPT], GREEDY) + alone(folder, [PROMPT], SEEDED)
    one, two = AsyncLLM(folder, **SMALL), AsyncLLM(folder, **SMALL, tensor_parallel_size=2)
    try:
        for prefill, decode in ((one, two), (two, one)):
            worker = PrefillWorker(prefill, listen("in-process", b"key"))
            address = worker.listener.address
            decode.remote = remote = RemotePrefill(decode, {"p": lambda address=address: connect(address, b"key")})
            until(lambda remote=remote: remote.states()["ready"] == 1)

            async def both(decode=decode):
                return [
                    [o async for o in decode.generate(PROMPT, params)][-1].outputs[0].token_ids
                    for params in (GREEDY, SEEDED)
                ]

            assert asyncio.run(both()) == want
            assert dict(remote.stats.outcomes) == {("loaded", ""): 2}
            until(lambda worker=worker: not worker.num_jobs)
            decode.remote = None
            remote.close()
            worker.close()
            for llm in (one, two):
                until(lambda llm=llm: not llm.core.outputs)
                llm.engine.cache.check()
                assert llm.engine.cache.num_live == 0
    finally:
        one.shutdown()
        two.shutdown()
        shutil.rmtree(folder)
