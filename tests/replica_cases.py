"""What the tests of replicas share: one loop for all of a module, requests, and a way to look into an engine."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

from server_life import Steps, wait_for

from minillm import SamplingParams


def greedy(max_tokens, **more):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


async def whole(replica, prompt, params=None, *args, **whose):
    """The last output."""
    last = None
    async for output in replica.generate(prompt, params, *args, **whose):
        last = output
    return last


async def until(true, what):
    """As `wait_for`, while the loop goes on."""
    return await asyncio.to_thread(wait_for, true, what)


async def read(outputs, tokens):
    """Read until there are so many tokens."""
    async for output in outputs:
        if len(output.outputs[0].token_ids) >= tokens:
            return output
    raise AssertionError("it ended before")


@contextlib.contextmanager
def held(llm):
    """Steps of an engine that wait until they are let through: `server_life.Steps`."""
    steps = Steps(SimpleNamespace(state=SimpleNamespace(llm=llm)))
    steps.core.step = steps._held
    try:
        yield steps
    finally:
        steps.close()


def empty(llm):
    cache = llm.engine.cache
    cache.check()
    return cache.num_live == 0 and not llm.core.outputs and not llm._ids


def ids_of(output):
    return [o.token_ids for o in output.outputs]
