"""One rank of a split over torch.distributed, for test_disagg_processes.py: rank 0 prefills, rank 1 decodes."""

from __future__ import annotations

import asyncio
from typing import Any

from disagg_pair import GREEDY, PROMPT, SEEDED, SMALL, until

from minillm import AsyncLLM
from minillm.cluster.distributed import DistChannel
from minillm.cluster.prefill_worker import PrefillWorker
from minillm.cluster.remote_prefill import RemotePrefill
from minillm.cluster.transport import ChannelClosed, listen


def side(group: Any, folder: str) -> Any:
    llm, channels = AsyncLLM(folder, **SMALL), [DistChannel(group)]
    if group.rank == 0:
        worker = PrefillWorker(llm, listen("in-process", b"key"))
        worker.serve(channels.pop())
        until(lambda: not worker.peers, seconds=300.0)  # D has closed the channel
        found = sorted(worker.stats.outcomes.values()), llm.engine.cache.num_live
        worker.close()
        llm.shutdown()
        return found

    def connect() -> DistChannel:
        if not channels:
            raise ChannelClosed("the channel was used")
        return channels.pop()

    llm.remote = remote = RemotePrefill(llm, {"p": connect})
    until(lambda: remote.states()["ready"] == 1, seconds=300.0)

    async def both() -> list[list[int]]:
        return [[o async for o in llm.generate(PROMPT, p)][-1].outputs[0].token_ids for p in (GREEDY, SEEDED)]

    tokens = asyncio.run(both())
    llm.shutdown()
    return tokens, [[*outcome, n] for outcome, n in remote.stats.outcomes.items()], llm.engine.cache.num_live
