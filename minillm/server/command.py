"""What `minillm serve` does: load, listen, say where, drain when told to end. Lesson 13.

Exit codes: 0 every answer was finished; 1 the engine ended by itself or never computed anything, or a drain had to
cut answers short. A prompt that a prefill server gives back is none: it is computed by the server that asked.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from typing import Any

from minillm.async_llm import AsyncLLM
from minillm.commands.serve import options, tell
from minillm.errors import MinillmError
from minillm.parallel.engine import serve_as_worker
from minillm.server.app import make_app, make_tenants
from minillm.server.config import ServerConfig
from minillm.server.metrics import PREFIX
from minillm.server.run import listen, serve, stop_on_signals, url_of
from minillm.server.tenants import Tenants


def main(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it says in four lines that it has started
    server, engine = options(args)
    config = ServerConfig(**server)
    serve_as_worker(args.model, engine)  # under torchrun, and not rank 0: does not come back
    sock = listen(config)  # before the weights are read: a port that is taken should not cost a minute
    try:
        parts, served = _mounted(args, engine, config)
        _order(engine, parts)
        tenants = make_tenants(config)  # before the weights, too; and once, so that keys and floors belong together
        if config.tenants is not None:
            engine |= _for_tenants(config, tenants, engine, parts)
        llm, side = _load(args, config, engine, parts, served.get("transfer"))
    except BaseException:
        sock.close()
        raise
    try:
        return asyncio.run(_serve(args, llm, config, sock, served.get("admission"), tenants, side))
    finally:
        sock.close()
        llm.shutdown()
        if side is not None:
            side.close()


def _load(
    args: argparse.Namespace, config: ServerConfig, engine: dict[str, Any], parts: dict[str, Any], machine: Any = None
) -> tuple[AsyncLLM, Any]:
    """The engine, and what its role in a split needs beside it (None for role both). machine: of its transfers."""
    if config.role == "both" and config.split is None:
        return AsyncLLM(args.model, parts=parts, **engine), None
    from minillm.server import handover

    children = door = None
    if config.split is not None:
        children = handover.start_children(config, args, engine)
        engine |= handover.shares(args, engine, len(children[0]))
    else:
        door = handover.open_door(config)
    llm = None
    try:
        llm = AsyncLLM(args.model, parts=parts, **engine)
        return llm, handover.start(config, llm, children, door, machine)
    except BaseException:
        if door is not None:
            door.close()
        if llm is not None:
            llm.shutdown()
        if children is not None:
            handover.end_children(children[0])
        raise


async def _serve(
    args: argparse.Namespace, llm: AsyncLLM, config: ServerConfig, sock: Any, admission: Any, tenants: Tenants,
    side: Any = None,
) -> int:  # fmt: skip
    stop, hurry = asyncio.Event(), asyncio.Event()
    stop_on_signals(stop, hurry)
    url = url_of(config, sock)

    def ready() -> None:
        model = app.state.minillm.model_name
        if config.role == "prefill":
            tell(
                args,
                event="ready",
                url=url,
                model=model,
                kv_address=side.address,
                text="minillm: ready to compute "
                f"prompts for servers with --role decode --prefill {side.address} (model {model}; {url}/metrics)",
            )
            return
        tell(args, event="ready", url=url, model=model, text=f"minillm: ready at {url}/v1 "
             f"(model {model}; a page to chat with at {url}/)")  # fmt: skip

    app = make_app(llm, config, admission=admission, tenants=tenants, on_ready=ready)
    if side is not None:
        from minillm.server.handover import HandoverMetrics

        metrics = app.state.minillm.metrics
        metrics.add(HandoverMetrics(side, PREFIX, metrics.model_name))
        app.state.minillm.lifecycle.beside = side.worker
    ended = await serve(app, config, sock, stop, hurry)
    if llm.dead is not None:
        tell(args, event="ended", cut_short=ended, text=f"minillm: the engine has ended: {llm.dead}")
        return 1
    if (why := app.state.minillm.lifecycle.failed) is not None:
        tell(args, event="ended", cut_short=ended, text=f"minillm: ended: {why}")
        return 1
    if config.role == "prefill":
        back = app.state.minillm.lifecycle.given_back
        tell(args, event="ended", cut_short=ended, given_back=back,
             text=f"minillm: ended; {back} prompts were given back to be computed elsewhere")  # fmt: skip
        return 0
    tell(args, event="ended", cut_short=ended, text=f"minillm: ended; {ended} answers were cut short")
    return 1 if ended else 0


def _mounted(
    args: argparse.Namespace, engine: dict[str, Any], config: ServerConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts of the engine, and of the server, from the notebooks of --use. Adds the options that they need."""
    if not args.use:
        return {}, {}
    from minillm.course.mount import load_all

    mine = load_all(args.use)
    if "transfer" in mine.server and config.role != "decode" and config.split is None:
        raise MinillmError(
            f"{mine.names['transfer']} receives KV from a prefill server, and there is none: add --split 1p1d, or "
            "--role decode with --prefill"
        )
    mine.config({name: value for name, value in engine.items() if value != args.default_of(name)})
    engine |= mine.options
    tell(args, event="mounted", parts=mine.names, notes=mine.notes, text="\n".join(mine.lines()))
    return mine.parts, mine.server


def _order(engine: dict[str, Any], parts: dict[str, Any]) -> None:
    """By priority, unless a mounted part decides about the order or somebody has asked for another."""
    mounted = sorted({"policy", "scheduler"} & set(parts))
    asked = engine["scheduling_policy"]
    if mounted and asked is not None:
        raise MinillmError(
            f"--scheduling-policy {asked} and a mounted {mounted[0]} both decide about the order; give one of the two"
        )
    engine["scheduling_policy"] = asked or ("fcfs" if mounted else "priority")
    if engine["scheduling_policy"] != "priority":
        engine.pop("priority_ageing_s")


def _for_tenants(
    config: ServerConfig, tenants: Tenants, engine: dict[str, Any], parts: dict[str, Any]
) -> dict[str, Any]:
    """The engine's options that a tenants file asks for: floors in the prefix cache, and an order by class."""
    floors = {t.name: t.cache_floor for t in tenants.tenants if t.cache_floor}
    if floors and not engine["enable_prefix_caching"]:
        raise MinillmError(
            f"{config.tenants}: cache_floor needs the prefix cache; leave --no-enable-prefix-caching out"
        )
    ordered = engine["scheduling_policy"] == "priority" or {"policy", "scheduler"} & set(parts)
    if not ordered and any(t.priority for t in tenants.tenants):
        raise MinillmError(
            f"{config.tenants}: a tenant's priority needs --scheduling-policy priority, "
            f"got {engine['scheduling_policy']!r}"
        )
    return {"cache_floors": floors}
