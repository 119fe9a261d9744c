"""What the server costs: the same streams through `AsyncLLM` directly and through HTTP and SSE, in turn. Lesson 13.

burst    as many streams at once as the engine has seats; seconds until the last has its last token
probe    all seats but one decode, and newcomers take the last one, one after another; the median of their TTFT. They
         arrive at any moment of a step, as users do; in a burst, TTFT would tell how prompts were packed into steps
outside  of a newcomer's TTFT, what the engine did not see: TTFT - (first token - arrival) by the engine's own stamps
idle     resident memory of this process, which is the server's, before and while connections are held open
alone    requests that run alone, of shapes that the fit of C = a m + b n has not seen (held_out.py)
cpu      processor seconds of a burst: of this process on either side (engine, and server), and of the client's, which
         on a machine with few cores competes with both. They say where time went; threads that spin are in them

Predicted before: each token adds to a burst what a chunk costs (processor seconds of server and client, measured with
bare.py), as if nothing overlapped; a request alone takes a m + b n.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from minillm.bench import bare, held_out, streams
from minillm.bench.common import Options, ceilings, ceilings_after, progress, random_tokens, recorder
from minillm.bench.streams import PROBE_TOKENS, Remote
from minillm.errors import MinillmError
from minillm.models import hub
from minillm.roofline.evidence import seconds
from minillm.roofline.quantities import SERVING_GOALS
from minillm.trace.client import Call
from minillm.trace.latency import Stamps, duration

PROBES = 16  # newcomers a round
SHORT = 16  # prompt tokens of the streams that newcomers find
LONG = 480  # tokens that those would write; they are left before
CONNECTIONS = 500
CPU = ("cpu.direct", "cpu.http", "cpu.client")


class Direct:
    """`AsyncLLM` without a server: what a chunk is, is what a stream would send. `send` is a side of streams.py."""

    def __init__(self, llm: Any):
        self.llm, self.count = llm, 0

    async def send(
        self, call: Call, scheduled: float | None = None, on_text: Callable[[str], None] | None = None
    ) -> Stamps:  # fmt: skip
        from minillm.request import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=call.max_tokens, ignore_eos=True)
        self.count += 1
        name, shown, counted, chunks, output = f"direct-{self.count}", 0, 0, [], None
        sent = time.perf_counter()
        async for result in self.llm.generate({"prompt_token_ids": call.prompt}, params, name):
            output = result.outputs[0]
            if len(output.text) > shown:
                chunks.append((time.perf_counter(), len(output.token_ids) - counted))
                if on_text is not None:
                    on_text(output.text[shown:])
                shown, counted = len(output.text), len(output.token_ids)
        tokens = len(output.token_ids) if output is not None else 0
        return Stamps(
            sent, sent, tuple(chunks), time.perf_counter(), len(call.prompt), tokens, 200,
            finish_reason=output.finish_reason if output is not None else None, request_id=name,
        )  # fmt: skip


class Loop:
    """An asyncio loop in a thread: the direct side has what the server has."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="minillm-direct", daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(streams.PATIENCE)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


def run(options: Options) -> dict[str, Any]:
    """Predict from what a bare chunk costs, measure both sides in turn, check, record."""
    from minillm.async_llm import AsyncLLM
    from minillm.server.local import LocalServer

    options.model = options.model or hub.EMBEDDED
    if options.requests < 2:
        raise MinillmError("--requests must be at least 2: one stream that runs, and one that joins it")
    rounds = options.repeats or 3
    folder = hub.resolve(options.model)
    device = ceilings(options)
    longest = max(options.prompt + max(options.new, PROBE_TOKENS), SHORT + LONG)
    llm = AsyncLLM(
        folder, dtype=options.dtype, device=options.device, max_num_seqs=options.requests, max_model_len=longest
    )
    direct, loop = Direct(llm), Loop()
    try:
        vocab = llm.engine.model.config.vocab_size
        work = Work(options, vocab, llm)
        burst_s, step_s = _warm(work, loop, direct)
        costs = bare.costs(options.requests)
        train, held = held_out.shapes(options.prompt, options.new)
        requests = lambda turn, shapes: held_out.draw(options, vocab, turn, shapes)
        alone = lambda turn, shapes: loop.run(held_out.alone(direct.send, requests(turn, shapes)))
        seen = [alone(f"fit {i}", train) for i in range(held_out.TIMES)]
        cost = held_out.fit(train, seen)
        book = recorder(
            options, device, weights="checkpoint", repeats=rounds, streams=options.requests, prompt=options.prompt,
            new=options.new, probes=PROBES, probe_tokens=PROBE_TOKENS, connections=CONNECTIONS, max_model_len=longest,
            bare=costs, warm_step_s=step_s, warm_burst_s=burst_s,
            cost={"a": cost.a, "b": cost.b, "shapes": train, "seconds": seen},
            order="direct http, http direct, ...; fresh tokens in every round",
            client="a process of its own on the same cores", timer="perf_counter of the client",
            goals=SERVING_GOALS,
        )  # fmt: skip
        chunks = options.requests * options.new
        book.expect("burst.ratio", "serving_ratio", chunks=chunks, burst_s=burst_s, chunk_s=costs["chunk_s"])
        book.expect(
            "probe.added", "serving_ttft", streams=options.requests, step_s=step_s, chunk_s=costs["chunk_s"],
            request_s=costs["request_s"],
        )  # fmt: skip
        if bare.resident() is not None:
            book.expect("idle.bytes", "connection_bytes", connections=CONNECTIONS, each=costs["connection_bytes"])
        held_out.expect(book, cost, held)
        options.out(f"predictions sealed: sha256 {book.seal()}")
        with LocalServer(llm) as server, Remote(server.url) as client:
            _race(book, work, loop, direct, client, rounds)
            held_out.enter(book, held, [alone(f"held out {i}", held) for i in range(rounds)])
            _idle(book, client)
            _same_text(book, work, loop, direct, client)
    finally:
        loop.close()
        llm.shutdown()
    for side in ("direct", "http"):
        book.derive(f"burst.{side}.tokens_per_s", "rate", [f"burst.{side}"], count=options.requests * options.new)
    book.derive("burst.ratio", "ratio", ["burst.http", "burst.direct"])
    book.derive("probe.added", "difference", ["probe.http", "probe.direct"])
    book.derive("tpot.ratio", "ratio", ["tpot.http", "tpot.direct"])
    return book.finish(ceilings_after(options))


class Work:
    """Seeded prompts of a round, and what the engine must be before the next one."""

    def __init__(self, options: Options, vocab: int, llm: Any):
        self.options, self.vocab, self.llm = options, vocab, llm

    def draw(self, turn: int) -> dict[str, dict[str, Any]]:
        o, rng = self.options, random.Random(f"{self.options.seed} {turn}")
        some = lambda count, length: [random_tokens(rng, length, self.vocab) for _ in range(count)]
        return {
            "burst": {"prompts": some(o.requests, o.prompt), "new": o.new},
            "probes": {"background": some(o.requests - 1, SHORT), "new": LONG, "prompts": some(PROBES, o.prompt)},
        }

    def settle(self) -> None:
        """Wait until the engine has nothing left, and forget its events."""
        end = time.monotonic() + 60
        while self.llm.core.has_work:
            if time.monotonic() > end:
                raise MinillmError("streams that were left still run after a minute: the server did not cancel them")
            time.sleep(0.005)
        self.llm.engine.events.clear()

    def outside(self, found: Sequence[Stamps]) -> list[float]:
        """TTFT minus what the engine saw of it, for every request that both sides know by its id."""
        began: dict[str, float] = {}
        engine: dict[str, float] = {}
        for e in self.llm.engine.events.of("queued", "first_token"):
            name = e.request_id
            if e.kind == "queued":
                began[name] = e.data.get("arrival", e.time)
            elif name in began:
                engine[name] = e.time - began[name]
        ttft = [
            (s.ttft, next((v for k, v in engine.items() if s.request_id.endswith(k.split("~")[0])), None))
            for s in found
        ]
        return [a - b for a, b in ttft if a is not None and b is not None]


def _warm(work: Work, loop: Loop, direct: Direct) -> tuple[float, float]:
    """Seconds of a burst of the direct side, and of a decode step in it (the median gap), after a first one."""
    jobs = work.draw(-1)
    loop.run(streams.burst(direct.send, **(jobs["burst"] | {"new": 2})))
    loop.run(streams.probes(direct.send, **(jobs["probes"] | {"prompts": jobs["probes"]["prompts"][:2]})))
    work.settle()
    found = loop.run(streams.burst(direct.send, **work.draw(-3)["burst"]))
    work.settle()
    gaps = [gap for s in found for gap in s.itl]
    if not gaps:
        raise MinillmError("--new must be at least 2: a decode step is the time between two tokens")
    return duration(found), statistics.median(gaps)


def _race(book: Any, work: Work, loop: Loop, direct: Direct, client: Remote, rounds: int) -> None:
    o = work.options
    keys = [f"{what}.{side}" for what in ("burst", "probe", "outside", "tpot") for side in ("direct", "http")]
    samples: dict[str, list[float]] = {key: [] for key in [*keys, *CPU]}
    whole, ran, known = True, [], 0
    client.do("burst", **work.draw(-1)["burst"])  # its code and the server's are warm too
    work.settle()
    for r in progress(range(rounds), "serving"):
        jobs = work.draw(r)
        for side in ("direct", "http")[:: 1 if r % 2 == 0 else -1]:
            before = time.process_time()
            if side == "direct":
                bursts = loop.run(streams.burst(direct.send, **jobs["burst"]))
                samples["cpu.direct"].append(time.process_time() - before)
                work.settle()
                newcomers, still = loop.run(streams.probes(direct.send, **jobs["probes"]))
            else:
                answer = client.do("burst", **jobs["burst"])
                bursts = answer["stamps"]
                samples["cpu.http"].append(time.process_time() - before)
                samples["cpu.client"].append(answer["cpu"])
                work.settle()
                answer = client.do("probes", **jobs["probes"])
                newcomers, still = answer["stamps"], answer["ran"]
            outside = work.outside(newcomers)
            known += len(outside)
            work.settle()
            ran.append(still)
            whole &= all(s.ok and s.tokens == o.new and s.prompt_tokens == o.prompt for s in bursts)
            whole &= all(s.ok and s.tokens == PROBE_TOKENS for s in newcomers)
            if not whole:
                wrong = next((s for s in [*bursts, *newcomers] if not s.ok), None)
                why = wrong and (wrong.error or wrong.status)
                raise MinillmError(f"a stream of the {side} side is not whole: {why}")
            samples[f"burst.{side}"].append(duration(bursts))
            samples[f"tpot.{side}"].append(statistics.median(s.tpot for s in bursts if s.tpot is not None))
            samples[f"probe.{side}"].append(statistics.median(s.ttft for s in newcomers if s.ttft is not None))
            samples[f"outside.{side}"].append(statistics.median(outside) if outside else 0.0)
    for key, values in samples.items():
        book.measured(key, values)
    streams_each = rounds * 2 * o.requests
    book.check("every stream has the tokens asked for", whole, f"{streams_each} streams of {o.new}, both sides")
    full = all(n == o.requests - 1 for n in ran)
    book.check("newcomers found all other seats taken to the end", full, f"{min(ran)} of {o.requests - 1} streams")
    book.check("engine and client know each newcomer by one id", known == 2 * rounds * PROBES, f"{known} newcomers")


def _idle(book: Any, client: Remote) -> None:
    if (before := bare.resident()) is None:
        return
    held = client.do("hold", connections=CONNECTIONS, path="/health")
    after = bare.resident()
    client.do("drop")
    book.measured("idle.before", [before], unit="bytes")
    book.measured("idle.after", [after], unit="bytes")
    book.derive("idle.bytes", "difference", ["idle.after", "idle.before"])
    detail = f"{held['open']} open, {held['answered']} answered"
    book.check("idle connections are open and were answered", held["answered"] == held["open"] == CONNECTIONS, detail)


def _same_text(book: Any, work: Work, loop: Loop, direct: Direct, client: Remote) -> None:
    prompt, new = work.draw(-2)["burst"]["prompts"][0], work.options.new
    text, _ = loop.run(streams.alone(direct.send, prompt, new))
    work.settle()
    other = client.do("alone", prompt=prompt, new=new)["text"]
    book.check("alone, both sides write the same text", bool(text) and text == other, f"{len(text)} characters")


def show(record: dict[str, Any]) -> str:
    """The record as text."""
    setup, derived, goals = record["setup"], record["derived"], record["setup"]["goals"]
    lines = [f"{setup['streams']} streams, prompts of {setup['prompt']} tokens, {setup['new']} new ones each"]
    for key, e in record["results"].items():
        if e["unit"] == "s":
            lines.append(f"  {key:<18}{seconds(e['median']):>10} (p10 {seconds(e['p10'])}, p90 {seconds(e['p90'])})")
    for key, what, form, goal in (
        ("burst.ratio", "time through the server / direct", lambda v: f"{v:.3f}", goals["ratio"]),
        ("probe.added", "TTFT that the server adds, median", lambda v: f"{1e3 * v:.2f} ms", goals["ttft_s"]),
        ("idle.bytes", "idle connections", lambda v: f"{v / 1e6:.1f} MB", goals["connection_bytes"]),
    ):
        if key in derived:
            e, p = derived[key], record["predictions"][key]["prediction"]
            lines.append(
                f"  {what}: {form(e['median'])} (p10 {form(e['p10'])}, p90 {form(e['p90'])}); predicted "
                f"{form(p['expected'])}, goal at most {form(goal)}"
            )
    if held_out.ERROR in derived:
        e, cost = derived[held_out.ERROR], setup["cost"]
        lines.append(
            f"  alone: {seconds(cost['a'])} a prompt token, {seconds(cost['b'])} an output token; unseen shapes are "
            f"{e['median']:.1%} off in the median (at most {e['max']:.1%}), goal at most {goals['cost_error']:.0%}"
        )
    for side in ("direct", "http"):
        lines.append(f"  {side}: {derived[f'burst.{side}.tokens_per_s']['median']:.1f} tokens/s")
    lines += [f"  check  {'ok  ' if c['passed'] else 'FAIL'}  {c['name']}: {c['detail']}" for c in record["checks"]]
    return "\n".join(lines)
