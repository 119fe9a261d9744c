"""A rolling restart: two servers restart one after the other, and no client sees more than a moment.

The rule is `DataParallel`'s: what fails before its first token is tried elsewhere; what fails after it is told, and
never tried again, since the text would begin anew.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from server_life import WAIT_S, expected, lasting_port, metric, serving, tiny_model

from minillm.cluster.data_parallel import DataParallel
from minillm.cluster.remote import HttpReplica
from minillm.cluster.replica import ReplicaLost
from minillm.request import SamplingParams

ENGINE = {"max_model_len": 4096, "num_kv_blocks": 600}


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("rolling") / "model")


def greedy(tokens):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def front(fleet):
    """Asks nobody how they are unless told to: that a server has gone, it learns from a request that fails."""
    return DataParallel([HttpReplica(url, f"server {i}") for i, url in enumerate(fleet.urls)], refresh_s=1e6)


async def until(true, what):
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.005)


async def whole(front, prompt, tokens):
    return [o async for o in front.generate(list(prompt), greedy(tokens))][-1].outputs[0].text


class Fleet:
    """Servers on ports of their own, which stay theirs when they restart."""

    def __init__(self, folder, count, **options):
        self.folder, self.options = folder, options
        self.stacks = [ExitStack() for _ in range(count)]
        self.ports = [lasting_port() for _ in range(count)]
        self.servers = [self._start(i, port) for i, port in enumerate(self.ports)]
        self.urls = [s.url for s in self.servers]

    def _start(self, i, port):
        return self.stacks[i].enter_context(serving(self.folder, engine=ENGINE, port=port, **self.options))

    def restart(self, i):
        self.stacks[i].close()
        self.servers[i] = self._start(i, self.ports[i])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stack in self.stacks:
            stack.close()


def test_a_rolling_restart_loses_nothing(folder):
    prompts, length = [(i, i + 1) for i in range(2, 8)], 60
    want = {p: expected(folder, list(p), length) for p in prompts}
    wrong, done = [], []

    async def client(both, turn):
        while True:
            prompt = prompts[turn % len(prompts)]
            try:
                text = await whole(both, prompt, length)
            except Exception as error:
                text = error
            if text != want[prompt]:
                wrong.append(text)
            done.append(prompt)
            turn += 1

    async def load(count=12):
        most = len(done) + count
        await until(lambda: len(done) > most, "the load goes on")

    async def go(fleet):
        async with front(fleet) as both:
            clients = [asyncio.create_task(client(both, i)) for i in range(4)]
            for i in (0, 1):
                await load()
                old, retried = fleet.servers[i], both.retried
                await asyncio.to_thread(fleet.restart, i)
                assert old.state.lifecycle.ended == 0
                assert both.retried > retried  # the restart was met
                await both.refresh()
            await load()
            for c in clients:
                c.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    with Fleet(folder, 2, grace_s=600.0) as fleet:
        asyncio.run(go(fleet))
        assert all(metric(s, "request_success_total", finished_reason="length") > 1 for s in fleet.servers)
    assert wrong == []


def test_after_the_first_token_an_error_is_told_and_nothing_is_tried_again(folder):
    async def go(fleet):
        async with front(fleet) as both:
            given, outputs = [], both.generate([5, 6], greedy(1500))

            async def read():
                async for output in outputs:
                    given.append(output.outputs[0].text)

            reading = asyncio.create_task(read())
            await until(lambda: len(given) >= 20, "it is being answered")
            await asyncio.to_thread(fleet.restart, 0)
            with pytest.raises(ReplicaLost, match="shutting down") as caught:
                await reading
            assert both.retried == 0
            assert caught.value.tokens_sent >= 20
            return given[-1]

    with Fleet(folder, 2, grace_s=0.0) as fleet:
        text = asyncio.run(go(fleet))
        assert metric(fleet.servers[1], "http_requests_total", route="/v1/completions") == 0
    assert expected(folder, [5, 6], 1500).startswith(text)


def test_before_the_first_token_another_server_answers(folder):
    async def go(fleet):
        async with front(fleet) as both:
            await asyncio.to_thread(fleet.stacks[0].close)
            return await whole(both, (5, 6), 8), both.retried

    with Fleet(folder, 2, grace_s=0.0) as fleet:
        assert asyncio.run(go(fleet)) == (expected(folder, [5, 6], 8), 1)
