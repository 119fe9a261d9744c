"""An engine whose model is spread over processes. It schedules, samples and speaks like any other. Lesson 14."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minillm.attention.protocol import AttentionBackend
from minillm.cache.build import make_pool
from minillm.cache.paged import PagedCache
from minillm.cache.pool import KVPool
from minillm.config import ModelConfig, dtype_name
from minillm.device import pick_dtype
from minillm.engine import Engine, load_engine
from minillm.engine_config import EngineConfig
from minillm.errors import MinillmError
from minillm.models.load import load_transformer
from minillm.models.tokenizer import Tokenizer
from minillm.models.transformer import Transformer
from minillm.parallel import launch, worker
from minillm.parallel.executor import StageExecutor
from minillm.parallel.group import RankLost
from minillm.parallel.pool import ShardedPool
from minillm.parallel.runner import ParallelRunner
from minillm.parallel.shard import check
from minillm.parallel.turn import Turns


class Spread:
    """What an engine on rank 0 needs of the others: its pool among theirs, and the runner that tells them each step."""

    def __init__(self, launched: launch.Launched, model_config: ModelConfig, pool: KVPool):
        self.launched, self.ranks, self.pool = launched, launched.ranks, pool
        self.turns = Turns(launched.why, lambda: launched.lost)
        self.whole = ShardedPool(pool, model_config, self.ranks.world, self.ranks.place, self.turns)

    def make_runner(self, model: Transformer, cache: PagedCache, attention: AttentionBackend) -> ParallelRunner:
        executor = StageExecutor(model, attention, self.ranks.world, self.ranks.place)
        return ParallelRunner(executor, cache, self.turns)

    def close(self) -> None:
        self.launched.close(tell=not self.turns.under_way)  # another thread may be in a step that does not end
        self.turns.broken = self.turns.broken or RankLost("this engine was shut down; make a new one")


def load_parallel(
    folder: Path, model_config: ModelConfig, config: EngineConfig, parts: Mapping[str, Any] | None, identity: str
) -> Engine:
    """Rank 0's engine. Under torchrun the other ranks serve it instead, and then end their process (SystemExit)."""
    check(model_config, config.tensor_parallel_size, config.pipeline_parallel_size)
    if (parts or {}).get("attention") is not None:
        raise MinillmError("parts: attention runs on every rank, and the others do not have it; use one process")
    if (rank := launch.started_by_torchrun()) is not None:
        launch.expect_world(config.world_size)
        if rank > 0:
            worker.serve(folder, config, model_config, rank)
            raise SystemExit(0)
    device = torch.device(launch.device_of(config, 0))
    dtype = dtype_name(pick_dtype(config.dtype, model_config.dtype, device))
    launched = launch.Launched(folder, config, model_config, dtype)
    try:
        model = load_transformer(folder, model_config, config, device, launched.ranks)
        spread = Spread(launched, model_config, make_pool(model, config, launched.ranks))
        engine = Engine(model, Tokenizer(folder), config, parts, identity, spread)
    except BaseException as error:
        lost = launched.why(error) if isinstance(error, RankLost) else launched.lost
        launched.close(tell=False)
        if lost is None or lost is error or not isinstance(error, Exception):
            raise
        raise lost from error
    weakref.finalize(engine, spread.close)  # also when the interpreter ends
    return engine


def serve_as_worker(model: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
    """Of processes that torchrun has started, all but rank 0 are workers: they do not come back (SystemExit).

    Anywhere else, nothing. For a program that would do more on rank 0 than make the engine, such as listen on a port.
    """
    if (rank := launch.started_by_torchrun()) is None:
        return
    config = EngineConfig(**{name: value for name, value in options.items() if value is not None})
    launch.expect_world(config.world_size)  # also where it is 1: one of the others would listen on the port
    if rank:
        load_engine(model, config)
        raise SystemExit(0)
