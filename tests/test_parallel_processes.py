"""Real processes: the embedded model on three of them writes what one writes, and a rank that dies ends the engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from disagg_pair import until

from minillm import LLM, AsyncLLM, EngineConfig, MinillmError, ModelConfig, SamplingParams, cli
from minillm.errors import EngineLost
from minillm.parallel import launch, processes, worker
from minillm.parallel.group import run_threads
from minillm.parallel.processes import loopback
from minillm.parallel.ranks import Ranks, alike

pytestmark = pytest.mark.model
SMALL = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "seed": 7}
PROMPTS = [  # of more than a block each, so that there is something to keep
    "The capital of Germany is Berlin, the capital of Italy is Rome, and the capital of France is",
    "Once upon a time, in a village by the sea, there was a girl who could speak to fish, and",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
    "The moon goes round the earth, the earth goes round the sun, and the sun",
]  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=6)  # a step of three ranks on two cores is long
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=6, seed=3)


def tokens(llm, params, prompts=PROMPTS):
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


MARK = f"MINILLM_TEST_RANKS={os.getpid()}"  # in the environment of whatever these tests start


@pytest.fixture(autouse=True)
def _marked(monkeypatch):
    monkeypatch.setenv(*MARK.split("="))


def children():
    """Processes of other ranks that these tests have started, and that have not ended."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as command, open(f"/proc/{pid}/environ", "rb") as environment:
                if b"minillm.parallel.worker" in command.read() and MARK.encode() in environment.read():
                    pids.append(int(pid))
        except OSError:
            continue
    return pids


@pytest.fixture(scope="module")
def alone(embedded_folder):
    llm = LLM(embedded_folder, **SMALL)
    return {"greedy": tokens(llm, GREEDY), "drawn": tokens(llm, DRAWN), "chunked": tokens(llm, GREEDY, [LONG])}


LONG = list(range(1000, 1200))


@pytest.mark.parametrize(
    "grid",
    [{"tensor_parallel_size": 3}, {"tensor_parallel_size": 3, "pipeline_parallel_size": 2}],
    ids=["three ranks", "three times two"],
)
def test_the_same_tokens_as_one_process(embedded_folder, alone, grid):
    options = {
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 64,
        "kv_host_bytes": 64 << 20,
        "num_kv_blocks": 18,
        "preemption_mode": "swap",
    }
    threads = torch.get_num_threads()
    llm = LLM(embedded_folder, **SMALL, **options, **grid)
    try:
        assert tokens(llm, GREEDY) == alone["greedy"]
        assert tokens(llm, GREEDY, [LONG]) == alone["chunked"]
        assert tokens(llm, GREEDY, [LONG]) == alone["chunked"]  # the second time from the prefix cache
        assert llm.engine.cache.prefix.stats.hit_tokens > 0
        ranks = llm.engine.spread.ranks
        calls = ranks.stage.traffic.calls["all_reduce"]
        steps = llm.engine.events.step
        layers = 30 // grid.get("pipeline_parallel_size", 1)
        micro_batches = calls / (2 * layers + 1)
        assert steps <= micro_batches <= 2 * steps
        if "pipeline_parallel_size" not in grid:
            assert calls == steps * 61
        # Blocks went to the host tier and came back: gathered from all ranks, and given to each its part.
        assert tokens(llm, GREEDY) == alone["greedy"]
        assert tokens(llm, GREEDY, [LONG]) == alone["chunked"]
        assert tokens(llm, DRAWN) == alone["drawn"]
        (host,) = llm.engine.cache.tiers.stats.values()
        assert host["puts"] > 0
        assert host["hits"] > 0
        with pytest.raises(MinillmError, match="has a parallel engine already"):
            LLM(embedded_folder, **SMALL, tensor_parallel_size=3)
    finally:
        llm.shutdown()
    assert torch.get_num_threads() == threads
    assert not children()
    with pytest.raises(EngineLost, match="this engine was shut down; make a new one"):
        tokens(llm, GREEDY)


def test_the_pool_is_the_smallest_of_the_ranks(embedded_folder, alone, monkeypatch):
    """Stages of 15 layers hold as many blocks as any; a rank with less memory decides for all."""
    from minillm.cache import build

    monkeypatch.setattr(build, "free_memory", lambda device: 64 << 20)  # of this process, rank 0
    options = SMALL | {"max_num_seqs": 32, "enable_prefix_caching": True}
    options["public_prefixes"] = [list(numpy.arange(16))]  # whose numbers JSON does not know
    llm = LLM(embedded_folder, **options, pipeline_parallel_size=2)
    try:
        each = build.block_bytes(llm.engine.model.config, 16, 4)
        assert llm.engine.cache.pool.num_blocks == (32 << 20) // each // 2
        assert tokens(llm, GREEDY) == alone["greedy"]
        assert tokens(llm, DRAWN) == alone["drawn"]
    finally:
        llm.shutdown()


def test_an_engine_that_cannot_begin_says_which_rank_and_why(embedded_folder, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(launch.sys, "executable", "/bin/false")
    with pytest.raises(EngineLost, match=r"rank \d \(process \d+\) ended with exit code 1 before it had begun"):
        LLM(embedded_folder, **SMALL, tensor_parallel_size=3)
    assert torch.get_num_threads() == before
    assert not children()


def test_a_rank_that_cannot_be_started_leaves_none_behind(embedded_folder, monkeypatch):
    make = launch.RankProcess

    def only_one(rank, settings):
        if rank == 2:
            raise MinillmError("no more processes")
        return make(rank, settings)

    monkeypatch.setattr(launch, "RankProcess", only_one)
    fails(embedded_folder, "no more processes", tensor_parallel_size=3)


def listeners():
    """Where this process's and the workers' sockets listen: {"0100007F", ...} is 127.0.0.1."""
    found = set()
    for pid in [os.getpid(), *children()]:
        links = [os.path.join(f"/proc/{pid}/fd", n) for n in os.listdir(f"/proc/{pid}/fd")]
        own = set()
        for link in links:
            with contextlib.suppress(OSError):  # it is closed by now
                own.add(os.readlink(link))
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    found.add(fields[1].rpartition(":")[0])
    return found


def test_nobody_outside_can_speak_to_the_ranks_and_nothing_is_kept(embedded_folder):
    before = listeners()
    llm = AsyncLLM(embedded_folder, **SMALL, tensor_parallel_size=3)
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert listeners() - before <= loopback
    assert len(listeners() & loopback) >= 1
    model = weakref.ref(llm.engine.model)
    llm.shutdown()
    del llm
    until(lambda: gc.collect() >= 0 and model() is None)  # a thread of it may be on its way out


LIMIT_S = 600.0  # of a machine that is busy with other things, or stood still; what is waited for takes far less


async def signal_at_the_second_token(llm, victim, number):
    """A reader that is late sees several tokens at once."""
    sent = False
    async for output in llm.generate("Once", SamplingParams(max_tokens=240, ignore_eos=True)):
        if len(output.outputs[0].token_ids) >= 2 and not sent:
            assert llm.dead is None
            os.kill(victim, number)
            sent = True
            if number == signal.SIGSTOP:  # not before: a rank that runs may be late
                llm.engine.spread.launched.still_s = 1.0


@pytest.mark.parametrize("busy", [True, False], ids=["in a step", "while nobody asks"])
def test_a_dead_rank_ends_everybody_with_its_name_and_reason(embedded_folder, busy):
    async def main():
        llm = AsyncLLM(embedded_folder, **SMALL, tensor_parallel_size=3)
        try:
            victim = llm.engine.spread.launched._children[1].process.pid
            if not busy:
                os.kill(victim, signal.SIGKILL)
                await asyncio.to_thread(until, lambda: llm.dead is not None)
            told = rf"the engine has ended: rank 2 \(process {victim}\) was ended by SIGKILL"
            with pytest.raises(MinillmError, match=told):
                await signal_at_the_second_token(llm, victim, signal.SIGKILL)
            assert isinstance(llm.dead, EngineLost)
        finally:
            llm.shutdown()
        assert not children()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_an_engine_whose_rank_stands_still_can_be_shut_down(embedded_folder):
    """A step is under way that will never end: nobody listens, and nobody may be told."""

    async def main():
        llm = AsyncLLM(embedded_folder, **SMALL, pipeline_parallel_size=2)
        victim = llm.engine.spread.launched._children[0].process.pid

        async def stop_at_the_second_token():
            stopped = False
            async for output in llm.generate("Once", SamplingParams(max_tokens=240, ignore_eos=True)):
                if len(output.outputs[0].token_ids) >= 2 and not stopped:
                    os.kill(victim, signal.SIGSTOP)
                    stopped = True
                    await asyncio.to_thread(llm.shutdown, 0.5)

        try:
            with pytest.raises(MinillmError, match="the engine has ended"):
                await stop_at_the_second_token()
        finally:
            await asyncio.to_thread(llm.shutdown)
        assert not llm._thread.is_alive()
        assert not children()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_a_rank_that_stands_still_ends_everybody_with_its_name(embedded_folder):
    async def main():
        llm = AsyncLLM(embedded_folder, **SMALL, pipeline_parallel_size=2)
        victim = llm.engine.spread.launched._children[0].process.pid
        try:
            with pytest.raises(MinillmError, match=rf"rank 1 \(process {victim}\) has stood still for 1 s"):
                await signal_at_the_second_token(llm, victim, signal.SIGSTOP)
        finally:
            await asyncio.to_thread(llm.shutdown)
        assert not children()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_silence_is_counted_while_we_run_ourselves():
    """In looks and not by a clock, which goes on while this process is stopped (Ctrl+Z) and hears nobody."""
    rank = launch.RankProcess.__new__(launch.RankProcess)
    rank.rank, rank.silent, rank.ended, rank.process = 2, 0, threading.Event(), SimpleNamespace(pid=7)
    looks = round(30.0 / launch.LOOK_S)
    assert [rank.look(30.0) for _ in range(looks)] == [None] * looks
    rank._hear(".")
    assert [rank.look(30.0) for _ in range(looks)] == [None] * looks
    assert rank.look(30.0) == "rank 2 (process 7) has stood still for 30 s (MINILLM_STILL_S)"


def test_how_long_a_rank_may_be_silent_is_the_operators_choice(monkeypatch):
    """One that is debugged, or whose core is dumped, says nothing for as long as that takes."""
    monkeypatch.delenv("MINILLM_STILL_S", raising=False)
    assert launch.still_s() == 30.0
    for told, seconds in (("", 30.0), ("0", float("inf")), ("3", 3.0), ("90.5", 90.5)):
        monkeypatch.setenv("MINILLM_STILL_S", told)
        assert launch.still_s() == seconds
    for told in ("soon", "-1", "nan", "1"):
        monkeypatch.setenv("MINILLM_STILL_S", told)
        with pytest.raises(MinillmError, match=f"MINILLM_STILL_S is '{told}'; give seconds, 3 at least, or 0"):
            launch.still_s()


class Ended(launch.RankProcess):
    """A rank whose process has ended, or does when it is told."""

    def __init__(self, rank, code, *lines):
        self.rank, self.silent, self.lines, self.ended = rank, 0, list(lines), threading.Event()
        self.process = SimpleNamespace(pid=7, returncode=None)
        self.code = code

    def now(self):
        self.process.returncode = self.code
        self.ended.set()
        return self

    def kill(self):
        """It has ended."""


def watched(*ranks):
    """What the watcher says of them."""
    launched = launch.Launched.__new__(launch.Launched)
    launched._children, launched._closing, launched._joined = ranks, threading.Event(), False
    launched.lost, launched.on_lost, launched.still_s = None, None, 30.0
    launched._watch()
    return str(launched.lost)


def test_the_rank_that_failed_is_named_and_not_one_that_missed_it(monkeypatch):
    """Rank 1 ends because rank 2 does: as soon, or sooner, as rank 2 has more to clear away."""
    told = r"rank 2 \(process 7\) ended with exit code 1: CUDA out of memory; the engine needs all its ranks"
    missed, failed = Ended(1, 3).now(), Ended(2, 1, "CUDA out of memory")
    with monkeypatch.context() as patch:
        patch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: failed.now()))
        assert re.fullmatch(told, watched(missed, failed))  # it ends while we wait for it
    assert re.fullmatch(told, watched(missed, failed))
    monkeypatch.setattr(processes, "CAUSE_S", 0.0)
    assert watched(missed, Ended(2, 1)).startswith("rank 1 (process 7) ended with exit code 3;")


def test_only_the_ranks_that_are_watched_lose_nccls_own_watchdog(monkeypatch):
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    assert launch.among_ours()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # somebody's choice
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in launch.among_ours()


def test_ranks_with_different_options_are_told_which(embedded_folder):
    """Two that were started by hand: one would compute what the other does not know of."""
    model = ModelConfig.from_folder(embedded_folder)

    def agree(group, **of_rank_1):
        ranks = Ranks.__new__(Ranks)
        ranks.world = group
        config = EngineConfig(tensor_parallel_size=2, **(of_rank_1 if group.rank else {}))
        ranks._agree(alike(config, model, f"cuda:{group.rank}", "float32"))

    run_threads(2, lambda group: agree(group, scheduling_policy="priority", threads=1))  # as a server's rank 0 may have
    with pytest.raises(MinillmError, match="rank 1 was started with another block_size than rank 0"):
        run_threads(2, lambda group: agree(group, block_size=32))


def test_a_gpu_is_of_the_rank_unless_a_launcher_says_which(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "0")  # left behind by something else: all would compute on one
    config = EngineConfig(tensor_parallel_size=4)
    assert [launch.device_of(config, r) for r in range(4)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "1")  # of the second machine
    assert launch.device_of(config, 5) == "cuda:1"


def test_a_worker_is_started_by_rank_0(monkeypatch, capsys):
    for line in ("", "hello\n", "{}\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(line))
        assert worker.main() == 2
        assert "rank 0 starts this process" in capsys.readouterr().err


def test_after_a_start_that_failed_another_one_meets_where_its_ranks_look(monkeypatch):
    """A world has a number in this process, and in its new ranks it is the first."""
    from torch.distributed import TCPStore

    monkeypatch.setattr(launch, "MEET", timedelta(seconds=0.3))
    for name, value in loopback().items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        with pytest.raises(EngineLost, match="the ranks did not meet: .*timeout.* keys: /0/"):
            launch.join(store, 0, 2, "cpu")


@pytest.mark.parametrize(("rank", "world"), [("one", "3"), ("3", "3"), ("-1", "3"), ("0", "three"), ("0", "0")])
def test_a_launchers_variables_are_judged(monkeypatch, rank, world):
    for name, value in {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MinillmError, match=f"RANK {rank!r} and WORLD_SIZE {world!r}"):
        launch.started_by_torchrun()


def test_a_server_ends_with_the_rank_and_the_others_end_with_it(embedded_folder):
    options = ["--port", "0", "--dtype", "float32", "--max-model-len", "256", "--tensor-parallel-size", "3"]
    command = [sys.executable, "-m", "minillm", "serve", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert json.loads(server.stdout.readline())["event"] == "ready"
            victim = children()[0]
            os.kill(victim, signal.SIGKILL)
            told = json.loads(server.stdout.readline())
            assert told["event"] == "ended"
            assert f"(process {victim}) was ended by SIGKILL" in told["text"]
            assert server.wait(LIMIT_S) == 1
        finally:
            server.kill()
    until(lambda: not children())


def test_workers_of_a_killed_driver_end(embedded_folder):
    engine = f"LLM({str(embedded_folder)!r}, tensor_parallel_size=3)"
    code = f"from minillm import LLM; llm = {engine}; print('here', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout.readline() == "here\n"
        assert len(children()) == 2
        driver.kill()
        driver.wait()
    until(lambda: not children())


def test_under_torchrun(embedded_folder, alone, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal
        from minillm import LLM, SamplingParams
        with open({str(tmp_path)!r} + "/rank" + os.environ["RANK"], "w") as file:
            file.write(str(os.getpid()))
        llm = LLM({str(embedded_folder)!r}, **{SMALL!r}, tensor_parallel_size=3)
        for rank in (1, 2):  # the launcher tells all of them; rank 0 drains, and needs the others for it
            pid = int(open({str(tmp_path)!r} + "/rank" + str(rank)).read())
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        given = llm.generate({PROMPTS!r}, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        print("TOKENS", [o.outputs[0].token_ids for o in given])  # rank 0 alone comes here
        llm.shutdown()
    """)
    )
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run([*run, "3", str(script)], capture_output=True, text=True, timeout=LIMIT_S)
    told = [line for line in done.stdout.splitlines() if line.startswith("TOKENS")]
    assert told == [f"TOKENS {alone['greedy']}"], done.stderr[-2000:]
    assert done.returncode == 0


def test_under_torchrun_a_rank_leaves_signals_to_rank_0_before_that_has_its_engine(embedded_folder, monkeypatch):
    """Rank 0 may be told to end as soon as it has one, which is after the ranks have agreed on their pools."""
    did = []
    for owner, name in ((launch, "join"), (launch, "leave"), (worker, "Ranks"), (worker, "load_transformer")):
        monkeypatch.setattr(owner, name, lambda *_: None)
    monkeypatch.setattr(worker, "_leave_signals_to_rank_0", lambda: did.append("signals"))

    def agree(*_):
        raise EngineLost(f"agreed after {did}")

    monkeypatch.setattr(worker, "make_pool", agree)
    config = EngineConfig(tensor_parallel_size=3, device="cpu", threads=1)
    model = ModelConfig.from_folder(embedded_folder)
    with pytest.raises(EngineLost, match=r"agreed after \['signals'\]"):
        worker.serve(embedded_folder, config, model, 1)
    did.clear()
    with pytest.raises(EngineLost, match=r"agreed after \[\]"):  # rank 0 has started it, and ends it
        worker.serve(embedded_folder, config, model, 1, store="where the ranks meet")


def test_as_many_processes_as_ranks(embedded_folder, monkeypatch, capsys):
    """A launcher that has started others: they would wait for each other, or all listen on one port."""
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["serve", "--port", "0"]) == 2  # and no --tensor-parallel-size
    assert "2 processes were started, and the engine has 1 ranks" in capsys.readouterr().err
    with pytest.raises(MinillmError, match="2 processes were started, and the engine has 3 ranks"):
        LLM(embedded_folder, **SMALL, tensor_parallel_size=3)


def fails(folder, words, **options):
    with pytest.raises(MinillmError, match=words):
        LLM(folder, **SMALL, **(options or {"pipeline_parallel_size": 2}))
    assert not children()


def test_a_rank_that_fails_on_its_way_is_told_and_nobody_waits(embedded_folder, monkeypatch, tmp_path):
    """Before it has come, when it has come and not joined, and while it loads."""
    join, child = launch.join, launch.RankProcess

    def killed(*arguments):
        os.kill(children()[0], signal.SIGKILL)
        join(*arguments)

    def killed_before_they_agree(*arguments):
        seen.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
        os.kill(children()[0], signal.SIGKILL)
        return Ranks(*arguments)

    seen = []

    with monkeypatch.context() as patch:
        patch.setattr(launch, "device_of", lambda config, rank: "cpu")  # only here: the workers judge for themselves
        words = r"rank 1 \(process \d+\) ended with exit code 2: .*cuda"
        fails(embedded_folder, words, device="cuda:7", pipeline_parallel_size=2)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "join", killed)
        patch.setattr(launch, "MEET", timedelta(seconds=2))
        fails(embedded_folder, r"rank . \(process \d+\) was ended by SIGKILL")
    with monkeypatch.context() as patch:
        patch.setattr(launch, "Ranks", killed_before_they_agree)
        fails(embedded_folder, r"rank 1 \(process \d+\) was ended by SIGKILL")
    assert seen == ["0"]
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ  # the caller's own groups keep their watchdog
    with monkeypatch.context() as patch:
        patch.setattr(launch, "RankProcess", lambda rank, settings: child(rank, settings | {"folder": str(tmp_path)}))
        fails(embedded_folder, "code 2: .* has no config.json.* before it had begun")
        shutil.copy(embedded_folder / "config.json", tmp_path)
        fails(embedded_folder, "code 2: .* has no model.safetensors")


def test_an_interrupt_in_the_middle_leaves_an_engine_that_goes_on(embedded_folder, alone, ctrl_c):
    """A notebook's stop button."""
    llm = LLM(embedded_folder, **SMALL, tensor_parallel_size=3)
    try:
        step, steps = llm.engine.runner.executor.step, []

        def interrupted(parts):
            steps.append(1)
            if len(steps) == 3:
                signal.raise_signal(signal.SIGINT)
            return step(parts)

        llm.engine.runner.executor.step = interrupted
        with pytest.raises(KeyboardInterrupt):
            tokens(llm, GREEDY)
        assert llm.engine.cache.num_live == 0
        assert tokens(llm, GREEDY) == alone["greedy"]
    finally:
        llm.shutdown()
    assert not children()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "sizes that do: 1, 3"), ({"tensor_parallel_size": 0}, "positive whole number"),
        ({"pipeline_parallel_size": 31}, "more than the model's 30 layers"),
        ({"tensor_parallel_size": 3, "kv_cache": "contiguous"}, "need kv_cache='paged'"),
        ({"tensor_parallel_size": 3, "batching": "static"}, "batching='continuous'"),
        ({"tensor_parallel_size": 3, "batch_invariant": True}, "depends on how many there are"),
        ({"tensor_parallel_size": 3, "parts": {"attention": object}}, "runs on every rank"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(embedded_folder, options, words):
    with pytest.raises(MinillmError, match=words):
        LLM(embedded_folder, **options)
    assert not children()
