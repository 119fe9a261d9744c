"""Lesson 14: replicas that hang, are killed, never start, or lose their parent. Real processes; nothing stays behind.

One process is started, stopped, killed and started again by one test after the other: the tests are in that order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from replica_cases import greedy, held, ids_of, read, until, whole
from server_life import SMALL, WAIT_S, tiny_model, wait_for

pytest.importorskip("fastapi")

from minillm import AsyncLLM, child
from minillm.cluster import local_process
from minillm.cluster.data_parallel import DataParallel
from minillm.cluster.in_process import InProcessReplica
from minillm.cluster.local_process import CHILD, ProcessReplica, flags
from minillm.cluster.replica import ReplicaLost
from minillm.errors import MinillmError

LONG = (
    7000  # tokens: an answer that is still under way when something happens to it, also on a machine that stood still
)
ENGINE = SMALL | {"max_model_len": 8192, "num_kv_blocks": 1024}


def gone(pid):
    """No such process any more, and no zombie of it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("death") / "model")


@pytest.fixture(scope="module")
def run():
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(folder):
    with AsyncLLM(folder, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def process(run, folder):
    replica = ProcessReplica(folder, "child", silence_s=0.2, start_s=600.0, answer_s=WAIT_S, **ENGINE)
    run(replica.start())
    pid = replica.pid
    yield replica
    last = replica.pid
    run(replica.close())
    assert gone(pid)
    assert gone(last)
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "minillm-child"], "its threads end")


def stopped(process):
    os.kill(process.pid, signal.SIGSTOP)


def test_one_that_hangs_is_lost_and_comes_back(run, process):
    async def go():
        outputs = process.generate([5, 6], greedy(LONG))
        await read(outputs, 1)
        stopped(process)
        process.answer_s = 0.5
        with pytest.raises(ReplicaLost, match=r"no token for 0\.2 s, and no answer when asked") as caught:
            await read(outputs, LONG + 1)
        assert caught.value.tokens_sent >= 1
        assert not process.state().alive
        process.answer_s = WAIT_S
        os.kill(process.pid, signal.SIGCONT)
        while not (state := await process.refresh()).alive:
            await asyncio.sleep(0.02)
        # It hears that its client has left.
        while state.running or state.free_blocks + state.cached_blocks < state.total_blocks:
            await asyncio.sleep(0.02)
            state = await process.refresh()
        assert state.requests == 0

    run(go())


def test_killed_in_the_middle_is_told_with_the_tokens_that_were_sent(run, process, engine, monkeypatch):
    """Another replica is there, and is not asked: it could not go on where this one ended."""
    monkeypatch.setattr(local_process, "EPITAPH_S", WAIT_S)

    async def go():
        async with InProcessReplica(engine, "spare") as spare:
            both = DataParallel([process, spare])
            first = spare.generate([1], greedy(LONG))
            await anext(first)  # so that the process gets the next one
            outputs = both.generate([5, 6], greedy(LONG - 1))
            sent = len((await read(outputs, 2)).outputs[0].token_ids)
            os.kill(process.pid, signal.SIGKILL)
            counts = [sent]

            async def rest():
                async for output in outputs:
                    counts.append(len(output.outputs[0].token_ids))

            with pytest.raises(
                ReplicaLost, match=r"was ended by SIGKILL.*\d tokens of this answer were sent"
            ) as caught:
                await rest()
            assert caught.value.tokens_sent == counts[-1]
            assert caught.value.replica == "child"
            assert both.retried == 0
            await first.aclose()

    pid = process.pid
    run(go())
    assert gone(pid)
    state = process.state()
    assert (state.alive, state.ready) == (False, False)
    assert "SIGKILL" in state.why


def test_it_starts_again_as_another(run, process):
    before = process.state().epoch
    run(process.start())
    state = process.state()
    assert (state.alive, state.ready) == (True, True)
    assert state.epoch != before
    assert len(run(whole(process, [5, 6], greedy(3))).outputs[0].token_ids) == 3


def test_killed_before_the_first_token_is_answered_by_another(run, process, engine):
    """The process is stopped when it gets the request, so that no token can have come; then it is killed."""
    want = run(whole(engine, [5, 6, 7], greedy(12)))

    async def go():
        async with InProcessReplica(engine, "spare") as spare:
            both = DataParallel([process, spare])
            stopped(process)
            outputs = []

            async def ask():
                async for output in both.generate([5, 6, 7], greedy(12)):
                    outputs.append(output.outputs[0].token_ids)

            process._sent = -1  # of equals, the one that was asked less
            task = asyncio.create_task(ask())
            while not process.state().requests:
                await asyncio.sleep(0)
            os.kill(process.pid, signal.SIGKILL)
            await task
            assert both.retried == 1
            return outputs

    pid = process.pid
    outputs = run(go())
    counts = [len(o) for o in outputs]
    assert counts == sorted(set(counts)), "never the same token twice"
    assert outputs[-1] == ids_of(want)[0]
    assert gone(pid)


def test_it_ends_when_its_parent_is_gone():
    """Its standard input ends: what a parent that was killed cannot do any more, the kernel does."""
    long = "import time, minillm.cli; minillm.cli.main = lambda _: print('runs', flush=True) or time.sleep(600); "
    child = subprocess.Popen([sys.executable, "-c", long + CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"runs\n"
        child.stdin.close()
        assert child.wait(WAIT_S) == -signal.SIGTERM  # on which a server drains
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


# A start that fails --------------------------------------------------------------------------------------------------


def python(code):
    return [sys.executable, "-S", "-c", code]


STUBBORN = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', file=sys.stderr); "


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (python("import sys; print('cannot read the model', file=sys.stderr); sys.exit(3)"),
         r"exit code 3\. Its last lines:\n  cannot read the model$"),
        (python("import os; os.kill(os.getpid(), 11)"), "ended by SIGSEGV; it said nothing"),
        (["/no/such/program"], "cannot start /no/such/program: No such file"),
    ],
)  # fmt: skip
def test_why_it_did_not_start(run, command, words):
    with pytest.raises(MinillmError, match=words):
        run(ProcessReplica("m", "bad", command=command).start())


def test_an_option_that_serve_does_not_have(run, folder):
    with pytest.raises(
        MinillmError, match=r"exit code 2.*\n  minillm: error: unrecognized arguments: --no-such-flag 7"
    ):
        run(ProcessReplica(folder, "bad", no_such_flag=7).start())


def test_one_that_is_never_ready_is_ended(run):
    replica = ProcessReplica("m", "deaf", command=python(STUBBORN + "time.sleep(600)"), start_s=0.3, grace_s=0.0)
    pids = []
    plain = local_process.Child

    class Seen(plain):
        def __init__(self, *args):
            super().__init__(*args)
            pids.append(self.process.pid)

    local_process.Child = Seen
    try:
        with pytest.raises(MinillmError, match=r"did not become ready within 0.3 s"):
            run(replica.start())
    finally:
        local_process.Child = plain
    wait_for(lambda: gone(pids[0]), "it is ended")
    with pytest.raises(ReplicaLost, match="not started"):
        run(whole(replica, [1], greedy(1)))


def test_all_that_it_started_ends_with_it(run, tmp_path):
    """A process that helps it, say. A rank is a `Child` of its own, and ends when its standard input does."""
    file = tmp_path / "pid"
    sleeper = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']); open({str(file)!r}, 'w').write(str(p.pid) + '.'); time.sleep(600)"  # noqa: E501
    made = local_process.Child(python(sleeper), dict(os.environ))
    wait_for(lambda: file.exists() and file.read_text().endswith("."), "it has started another")
    os.kill(made.process.pid, signal.SIGKILL)
    assert made.ended.wait(WAIT_S)
    other = int(file.read_text()[:-1])
    # It is its adoptive parent's to wait for now, who may be slow, or not there: a zombie computes nothing.
    wait_for(lambda: gone(other) or _zombie(other), "the other is ended")


def _zombie(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_end_of_one_that_cannot_be_killed_is_not_waited_for(monkeypatch):
    """It hangs in a driver, or in a frozen cgroup. Here no signal is sent to it."""
    monkeypatch.setattr(child, "KILLED_S", 0.01)
    made = local_process.Child(python("import time; time.sleep(600)"), dict(os.environ))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(made, "kill", lambda: None)
            patch.setattr(made.process, "send_signal", lambda _: None)
            ending = threading.Thread(target=made.end, args=(-1.0,), daemon=True)
            ending.start()
            ending.join(WAIT_S)
            assert not ending.is_alive()
        assert not made.ended.is_set()
        assert made not in child._ALIVE
    finally:
        made.kill()
    assert made.ended.wait(WAIT_S)


def test_whoever_forgets_to_close_leaves_nothing_behind():
    """At the end of a process that has one, even of one that hears nothing."""
    script = (
        "import os, sys; from minillm.cluster.local_process import Child; "
        f"c = Child([sys.executable, '-S', '-c', {STUBBORN + 'time.sleep(600)'!r}], dict(os.environ)); "
        "print(c.process.pid)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    # Its own process has waited for it, or has given that up; then it is somebody else's to wait for.
    wait_for(lambda: gone(int(out.stdout)) or _zombie(int(out.stdout)), "it is ended")


def test_flags():
    got = flags(
        {"max_model_len": 8, "enforce_eager": True, "enable_prefix_caching": False, "seed": None, "use": ["a", "b"]}
    )
    assert got == [
        "--max-model-len",
        "8",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--use",
        "a",
        "--use",
        "b",
    ]


# In this process -----------------------------------------------------------------------------------------------------


def test_an_engine_that_ends_is_lost_and_starts_again(run, folder):
    async def go():
        made = []

        def make():
            made.append(AsyncLLM(folder, **ENGINE))
            return made[-1]

        replica = InProcessReplica(make, "own")
        async with replica:
            epoch = replica.state().epoch
            outputs = replica.generate([5, 6], greedy(LONG))
            await read(outputs, 2)

            def fails():
                raise SystemExit("the device is gone")

            made[0].core.step = fails
            with pytest.raises(ReplicaLost, match="the device is gone") as caught:
                await read(outputs, LONG + 1)
            assert caught.value.tokens_sent >= 2
            assert not replica.state().alive
            with pytest.raises(ReplicaLost):
                await whole(replica, [5], greedy(1))
            await replica.start()
            assert replica.state().epoch not in (epoch, None)
            assert len((await whole(replica, [5], greedy(3))).outputs[0].token_ids) == 3
        assert [llm._thread.is_alive() for llm in made] == [False, False]

    run(go())


def test_who_stops_waiting_for_an_engine_leaves_none_behind(run):
    """A thread that makes one cannot be cancelled."""
    inside, gate, ended = threading.Event(), threading.Event(), []

    def make():
        inside.set()
        assert gate.wait(WAIT_S)
        return SimpleNamespace(dead=None, shutdown=lambda: ended.append("the engine"))

    async def go():
        start = asyncio.create_task(InProcessReplica(make).start())
        assert await asyncio.to_thread(inside.wait, WAIT_S)
        start.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert ended == ["the engine"]

    run(go())


def test_an_engine_that_hangs(run, engine):
    async def go():
        async with InProcessReplica(engine, "stuck", silence_s=0.05) as replica:
            outputs = replica.generate([5, 6], greedy(LONG))
            await read(outputs, 1)
            with held(engine):
                replica.stall_s = 0.1
                with pytest.raises(ReplicaLost, match="no step has progressed"):
                    await read(outputs, LONG + 1)
                assert not replica.state().alive
            replica.stall_s = WAIT_S
            await until(lambda: not engine.core.outputs, "it goes on, and the one that was given up is out")
            assert replica.state().alive
            assert len((await whole(replica, [5], greedy(3))).outputs[0].token_ids) == 3

    run(go())


def test_a_step_that_fails_is_no_death(run, engine, monkeypatch):
    def fails(*_):
        raise RuntimeError("a kernel failed")

    async def go():
        async with InProcessReplica(engine, "one") as replica:
            with monkeypatch.context() as patch:
                patch.setattr(engine.core.runner, "forward", fails)
                with pytest.raises(MinillmError, match="a kernel failed") as caught:
                    await whole(replica, [5], greedy(3))
            assert not isinstance(caught.value, ReplicaLost)
            assert replica.state().alive
            assert len((await whole(replica, [5], greedy(3))).outputs[0].token_ids) == 3

    run(go())


def test_a_key_goes_by_the_environment(monkeypatch):
    monkeypatch.delenv("MINILLM_API_KEY", raising=False)
    replica = ProcessReplica("m", api_key="sk-of-this-test")
    assert "sk-of-this-test" not in " ".join(replica.command)
    assert (replica._env["MINILLM_API_KEY"], replica._keys[""]) == ("sk-of-this-test", "sk-of-this-test")
    monkeypatch.setenv("MINILLM_API_KEY", "sk-inherited")  # the child will ask for it, so we send it
    assert ProcessReplica("m")._keys[""] == "sk-inherited"
