"""A rank that is not rank 0: it loads its share, and then does what it is told, step by step. Lesson 14.

`Launched` starts it as `python -m minillm.parallel.worker`; under torchrun it is the same command as rank 0's. It ends
when rank 0 says so, or is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from minillm.attention.backends import make_attention
from minillm.cache.build import make_pool
from minillm.child import end_with_parent
from minillm.config import ModelConfig, dtype_name
from minillm.device import pick_dtype
from minillm.engine_config import EngineConfig
from minillm.errors import MinillmError
from minillm.models.load import load_transformer
from minillm.parallel import launch, messages
from minillm.parallel.executor import StageExecutor
from minillm.parallel.group import RankLost
from minillm.parallel.pool import obey
from minillm.parallel.processes import MISSED, leave_at_once
from minillm.parallel.ranks import Ranks
from minillm.parallel.shard import Place


def serve(folder: Path, config: EngineConfig, whole: ModelConfig, rank: int, store: Any = None) -> None:
    """Join the world, load, and obey until rank 0 ends it. Raises RankLost when another rank is gone.

    whole: the config of the whole model. store: where the ranks meet; None: as torchrun's variables say.
    """
    place = Place.of_rank(rank, config.tensor_parallel_size, config.pipeline_parallel_size)
    device = launch.device_of(config, rank)
    torch.set_num_threads(launch.threads_of(config, config.world_size))
    launch.join(store, rank, config.world_size, device)
    try:
        dtype = dtype_name(pick_dtype(config.dtype, whole.dtype, torch.device(device)))
        ranks = Ranks(place, config, whole, device, dtype)
        model = load_transformer(folder, whole, config, torch.device(device), ranks)
        if store is None:  # before the last word with rank 0: its engine may be there, and told to end, right after it
            _leave_signals_to_rank_0()
        pool = make_pool(model, config, ranks)
        executor = StageExecutor(model, make_attention(config.attention_backend, model, pool), ranks.world, place)
        while (numbers := messages.hear(ranks.world))[0] != messages.END:
            if numbers[0] == messages.STEP:
                executor.step(messages.decode(numbers[1:], model.device))
            else:
                obey(numbers, pool, whole, ranks.world, place)
    finally:
        launch.leave()


def _leave_signals_to_rank_0() -> None:
    """torchrun tells every rank to end. Rank 0 may have answers to finish, for which it needs the others; its end is
    theirs, told or seen by a connection that closes. If it does not end, torchrun kills them all."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def _beat() -> None:
    """Tell rank 0 that this process runs, whatever its main thread does."""
    with contextlib.suppress(OSError):  # rank 0 is gone
        while True:
            os.write(1, b".\n")
            time.sleep(launch.BEAT_S)


def main() -> int:
    """Started by rank 0: one line of JSON on stdin says what to do, and its end that rank 0 is gone."""
    try:
        settings = json.loads(sys.stdin.readline())
        config, rank, folder = EngineConfig(**settings["config"]), settings["rank"], Path(settings["folder"])
    except (ValueError, TypeError, KeyError):
        print("rank 0 starts this process; start `minillm serve --tensor-parallel-size N`", file=sys.stderr)
        return 2
    end_with_parent(lambda: os._exit(MISSED))
    threading.Thread(target=_beat, daemon=True).start()
    from torch.distributed import TCPStore

    try:
        store = TCPStore("127.0.0.1", settings["port"], config.world_size, is_master=False, timeout=launch.FOREVER)
        torch.zeros(1, device=launch.device_of(config, rank))  # what can fail does so before anybody waits for it
        whole = ModelConfig.from_folder(folder)
        store.set(f"here/{rank}", "1")
        serve(folder, config, whole, rank, store)
    except MinillmError as error:
        print(error, file=sys.stderr, flush=True)
        return MISSED if isinstance(error, RankLost) else 2  # not this rank's fault: rank 0 looks whose it is
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    if code := main():
        leave_at_once(code)
