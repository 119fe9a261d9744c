"""Two small engines and a wire between them that may fail on purpose: for test_disagg.py and its relatives."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time

from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import LLM, AsyncLLM, SamplingParams
from minillm.cluster.faulty import FaultyChannel
from minillm.cluster.in_process_transport import pair
from minillm.cluster.prefill_worker import PrefillWorker
from minillm.cluster.remote_prefill import RemotePrefill
from minillm.cluster.transport import ChannelClosed, listen

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=6, ignore_eos=True)
SMALL = {"num_kv_blocks": 24, "max_model_len": 192, "dtype": "float32", "block_size": 16, "threads": 1}
PROMPT = [(7 * i) % 200 + 5 for i in range(69)]  # 64 tokens in whole blocks of 16, and 5 more


def save_words(tiny_folder, tmp_path_factory):
    """A random Qwen3 of 211 words and 3 layers, with a tokenizer."""
    folder = tmp_path_factory.mktemp("disagg") / "model"
    shutil.copytree(tiny_folder("qwen3"), folder)
    Backend(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def alone(folder, prompts, params, **options):
    """What one engine gives."""
    llm = LLM(folder, **(SMALL | options))
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


class Split:
    """p and d, and the wire. faults_p: by message that P sends (0 hello, 1 reserve, 2 to 4 pieces of a prompt of one
    chunk, 5 done); faults_d: by message that D sends (0 submit, 1 reserved, 2 ack). Only the first wire is faulty."""

    def __init__(
        self, folder, faults_p=None, faults_d=None, lease_s=60.0, p=None, d=None, max_kept_bytes=1 << 30, **options
    ):
        self.folder, self.faults = folder, [(faults_p or {}, faults_d or {})]
        self.options_p, self.kept = SMALL | options | (p or {}), max_kept_bytes
        self.d = AsyncLLM(folder, **(SMALL | options | (d or {})))
        self.p, self.worker = None, None
        self.wires: list[tuple[FaultyChannel, FaultyChannel]] = []
        self.up()
        self.remote = self.d.remote = RemotePrefill(self.d, {"p": self.connect}, lease_s=lease_s)

    def up(self):
        self.p = AsyncLLM(self.folder, **self.options_p)
        self.worker = PrefillWorker(self.p, listen("in-process", b"key"), max_kept_bytes=self.kept)

    def down(self):
        worker, self.worker = self.worker, None
        worker.close()
        self.p.shutdown()

    def connect(self):
        if self.worker is None:
            raise ChannelClosed("nobody is there")
        faults_p, faults_d = self.faults.pop(0) if self.faults else ({}, {})
        mine, theirs = pair()
        self.wires.append((FaultyChannel(theirs, faults_p), FaultyChannel(mine, faults_d)))
        self.worker.serve(self.wires[-1][0])
        return self.wires[-1][1]

    def ready(self):
        until(lambda: self.remote.states()["ready"] == 1)
        return self

    def generate(self, prompt=PROMPT, params=GREEDY, **whose):
        async def run():
            return [output async for output in self.d.generate(list(prompt), params, **whose)][-1]

        return asyncio.run(run())

    def tokens(self, prompt=PROMPT, params=GREEDY):
        return self.generate(prompt, params).outputs[0].token_ids

    @property
    def outcomes(self):
        return dict(self.remote.stats.outcomes)

    def run_out(self):
        """The lease of all that is under way ends now, at both sides, each by its own clock."""
        self.d.call(lambda: [setattr(own.machine, "expires", -1.0) for own in self.remote.under_way.values()])
        for peer in list(self.worker.peers):
            for job in list(peer.jobs.values()):
                job.machine.expires = -1.0

    def tokens_after(self, struck):
        """`tokens`, with a lease that runs out when `struck()`: no time has to pass, and none is too short."""
        ended = threading.Event()

        def watch():
            until(lambda: struck() or ended.is_set())
            self.run_out()

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            return self.tokens()
        finally:
            ended.set()
            watching.join()

    def settled(self):
        """Both sides have let go of everything."""
        until(lambda: not self.d.core.outputs and not self.remote.under_way and self.d._commands.empty())
        if self.worker is not None:
            until(lambda: not self.p.core.outputs and not self.worker.num_jobs and self.p._commands.empty())
        for llm in (self.d, self.p):
            heard_everything(llm)
        if self.worker is not None:
            assert self.worker.kept_bytes == 0
            assert not self.worker.exporter._followed
        for llm in (self.d, self.p):
            cache = llm.engine.cache
            cache.check()
            assert cache.num_live == 0
            assert len(cache.reservations) == 0
            assert not llm.core.held
            assert not llm.core._watched
            assert not llm.core.failures
        assert all(peer.tokens == 0 for peer in self.remote.peers.values())
        return self

    def close(self):
        self.d.shutdown()
        if self.worker is not None:
            self.down()
        assert not self.d._thread.is_alive()


@contextlib.contextmanager
def splits(folder):
    """build(**options) -> a `Split` that is ready. At the end of the block all are closed."""
    made = []

    def build(**options):
        made.append(Split(folder, **options))
        return made[-1].ready()

    yield build
    for split in made:
        split.close()


def heard_everything(llm):
    """What its thread was at, when its queue was empty already, is done."""
    done = threading.Event()
    llm.call(done.set)
    until(lambda: done.is_set() or llm.dead is not None)


def until(holds, seconds=120.0):
    """Of a machine that is busy with other things, or stood still; what is waited for takes far less."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)
