"""One step after the other: schedule, compute, sample, hand on. Lesson 09 builds it.

`EngineCore` is the whole engine without a face: `LLM` and `AsyncLLM` put requests in and take text out. It belongs to
one thread. A step that fails ends the requests that were in it, with the reason, and nobody else. What a step in flight
reads stays until it retires (rule 4 of docs/source.md): between two steps an abort frees at once, inside one it waits
for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.cache.paged import PagedCache
from minillm.cache.swap import settle
from minillm.errors import EngineLost, MinillmError
from minillm.events import EventLog
from minillm.output import OutputProcessor
from minillm.parts import drawn
from minillm.request import Request, Status
from minillm.runner import Runner
from minillm.sampler import NO_TOKEN, no_token_error
from minillm.scheduler import ScheduledRow, SchedulerLike, SchedulerOutput

Delta = tuple[Request, str]
MAX_IDLE_STEPS = 8  # in a row, while somebody could run: then the scheduler is at fault


class EngineCore:
    """scheduler: which tokens; runner: their logits; sampler: the next ones; make_output: from tokens to text.

    failures keeps, for each request that a step failed, the exception.
    """

    def __init__(
        self, scheduler: SchedulerLike, runner: Runner, sampler: Any, make_output: Callable[[Request], OutputProcessor],
        cache: PagedCache | None = None, events: EventLog | None = None, max_tokens: int | None = None,
    ):  # fmt: skip
        self.scheduler, self.runner, self.sampler, self.make_output = scheduler, runner, sampler, make_output
        self.cache, self.max_tokens = cache, max_tokens
        self.events = events if events is not None else EventLog(0)
        self.clock = self.events.clock  # seconds; requests arrive, expire and finish by it
        self.outputs: dict[Request, OutputProcessor] = {}  # everybody who has not finished
        self.failures: dict[Request, BaseException] = {}
        self.idle_steps = 0  # in a row: nothing was scheduled
        self.progressed = self.clock()  # when a step last got on, or nobody waited for one
        self._stepping = False
        self.held: set[Request] = set()  # in `outputs`, and not in the scheduler: see `hold`
        self._watched: dict[Request, Callable[[Request], None]] = {}
        self._broken: dict[Request, Exception] = {}  # could not be queued again; told by the next step
        self._late: dict[Request, str] = {}  # aborted from inside the step under way, and why

    @property
    def has_work(self) -> bool:
        return bool(self.outputs)

    def add(self, request: Request) -> None:
        """Queue a request. Raises MinillmError for one that is in already, or was."""
        self._enter(request)
        try:
            self.scheduler.add(request)
        except BaseException:
            del self.outputs[request]
            raise
        self._queued(request)

    def hold(self, request: Request) -> None:
        """As `add`, but the request is not scheduled before `resume`: its KV is on its way (lesson 15). It can be
        aborted, and its deadline counts. Raises MinillmError as `add` does.
        """
        self._enter(request)
        self.held.add(request)
        self._queued(request)

    def resume(self, request: Request) -> None:
        """Queue a request that is held. For any other nothing happens. Between two steps."""
        if request not in self.held:
            return
        self.held.remove(request)
        try:
            self.scheduler.add(request)
            if request.paused:
                self.scheduler.pause(request, True)  # type: ignore[attr-defined]
        except Exception as error:  # a learner's scheduler or policy
            self._broken[request] = error

    def watch(self, request: Request, ended: Callable[[Request], None]) -> None:
        """ended(request) is called once, when the request ends, however it does. It must not raise."""
        self._watched[request] = ended

    def _enter(self, request: Request) -> None:
        if request in self.outputs or request.finished:
            raise MinillmError(f"request {request.request_id} was added before")
        if not self.outputs:
            self.progressed = self.clock()
        self.outputs[request] = self.make_output(request)

    def _queued(self, request: Request) -> None:
        self.events.record(
            "queued", request.request_id, prompt_tokens=request.num_prompt_tokens, max_tokens=request.max_tokens,
            priority=request.priority, tenant=request.tenant, arrival=request.times.get("arrival"),
        )  # fmt: skip

    def abort(self, request: Request, reason: str = "cancelled") -> str:
        """End a request now, wherever it is: its blocks are free at once. Returns the text that was held back.

        For one that has finished, or was never added, nothing happens. Called from inside a step (by a part, or by a
        generator that Python collects then), it ends the request when the step retires, which gives the text.
        """
        if request not in self.outputs:
            return ""
        if self._stepping:
            self._late.setdefault(request, reason)
            return ""
        self.events.record("aborted", request.request_id, computed=request.num_computed_tokens)
        return self._end(request, "abort", reason)

    def step(self) -> list[Delta]:
        """Compute one step. Returns (request, new text) for each request that got a token or has ended."""
        if self._stepping:
            raise MinillmError("a step is under way; a part of the engine cannot run the engine")
        self._stepping = True
        try:
            done = self._step()
        finally:
            self._stepping = False
            late, self._late = self._late, {}
            ended = [(r, self.abort(r, reason)) for r, reason in late.items() if r in self.outputs]
        return done + ended

    def _step(self) -> list[Delta]:
        begun = self.clock()
        done = self._expire(begun)
        while self._broken:
            r, fault = self._broken.popitem()
            done += self._fail([r] if r in self.outputs else [], fault)
        try:
            out = self.scheduler.schedule()
            self._judge(out)
        except EngineLost:
            raise
        except Exception as error:  # a scheduler, an allocator or a cache at fault: nobody's state can be trusted
            return done + self._fail(list(self.outputs), error)
        scheduled = self.clock() - begun
        for request, why in out.refused:
            self.events.record("refused", request.request_id, field="prompt", reason=str(why))
            done += self._fail([request], why)
        if not out.rows and not done:
            return self._idle()
        self.idle_steps = 0
        self.progressed = self.clock()
        if not out.rows:  # somebody was refused or has expired: that is progress
            return done
        rows = [(r.request_id, n, r.num_computed_tokens) for r, n in out.rows]
        for r, _ in out.rows:
            r.times.setdefault("scheduled", begun)
        try:
            self._compute(out.rows, done)
        except EngineLost:  # nobody can go on: whoever runs the engine ends them all
            raise
        except Exception as error:
            done += self._fail([r for r, _ in out.rows if r in self.outputs], error)
            rows = []  # what of it was computed, nobody knows
        except BaseException as error:  # an interrupt: the step's requests are lost, the engine is not
            self._fail([r for r, _ in out.rows if r in self.outputs], error)
            raise
        self._record(rows, begun, scheduled)
        self.progressed = self.clock()
        return done

    def _compute(self, rows: Sequence[ScheduledRow], done: list[Delta]) -> None:
        """Adds to `done` one by one: what a request has got is handed on even if a later one fails."""
        requests, counts = [r for r, _ in rows], [n for _, n in rows]
        logits = self.runner.forward(requests, counts)
        if self.cache is not None:
            for r in requests:
                try:
                    self.cache.commit(r)
                except Exception as error:  # a learner's prefix cache
                    done += self._fail([r], error)
        ready = [r for r in requests if not r.num_new_tokens] if self.cache is not None else requests
        if not ready:
            return
        tokens, logprobs = drawn(self.sampler.sample(logits, ready), logits.shape)
        now = self.clock()
        for i, (r, token, entry) in enumerate(zip(ready, tokens, logprobs, strict=True)):
            if r not in self.outputs:
                continue
            if token == NO_TOKEN:  # this row is no distribution; its request ends, the others go on
                done.append((r, self._end(r, "error", str(no_token_error(logits[i], r)))))
                continue
            r.times["last_token"] = now
            if "first_token" not in r.times:
                r.times["first_token"] = now
                self.events.record("first_token", r.request_id)
            if entry is not None:
                r.logprobs.append(entry)
            try:
                text = self.outputs[r].push(token)  # the last delta is complete
            except Exception as error:  # a learner's detokenizer
                done += self._fail([r], error)
                continue
            done.append((r, text))
            if r.finished:
                self._retire(r)

    # Endings -----------------------------------------------------------------------------------------------

    def _end(self, request: Request, reason: str, why: str) -> str:
        """End a request that has not ended by itself. Returns the text that was held back."""
        request.finish_reason, request.stop_reason = reason, why
        output = self.outputs[request]
        self._retire(request)
        try:
            return output.finish()
        except Exception:  # a learner's detokenizer; the reason is told, the rest of the text is lost
            return ""

    def _retire(self, request: Request) -> None:
        self.outputs.pop(request, None)
        request.times["finished"] = self.clock()
        self.events.record(
            "finished", request.request_id, reason=request.finish_reason, output_tokens=len(request.output_token_ids)
        )
        try:
            if request in self.held:
                self._let_go(request)
            else:
                self.scheduler.finish(request)
        except Exception as error:  # a learner's: told once, at the request
            self.failures.setdefault(request, error)
        self.runner.finish(request)
        if (ended := self._watched.pop(request, None)) is not None:
            ended(request)

    def _let_go(self, request: Request) -> None:
        """The end of a request that the scheduler has never seen."""
        self.held.remove(request)
        if self.cache is not None:
            self.cache.release(request)
            self.cache.forget(request)
        request.status = Status.FINISHED

    def _fail(self, requests: Sequence[Request], error: BaseException) -> list[Delta]:
        out = []
        for r in requests:
            self.failures[r] = error
            why = str(error) if isinstance(error, MinillmError) else f"{type(error).__name__}: {error}"
            out.append((r, self._end(r, "error", why)))
        return out

    def _expire(self, now: float) -> list[Delta]:
        """An expired request that still waits never runs."""
        waiting, out = getattr(self.scheduler, "waiting", None), []
        for r in [r for r in self.held if r.deadline is not None and r.deadline < now]:
            out.append((r, self._end(r, "abort", f"its deadline passed {now - (r.deadline or now):.2f} s ago")))
        expired = getattr(waiting, "expired", None)
        while expired is not None and (r := expired(now)) in self.outputs:
            out.append((r, self._end(r, "abort", f"its deadline passed {now - (r.deadline or now):.2f} s ago")))
        return out

    def _idle(self) -> list[Delta]:
        """A step without work. Several in a row, while somebody could run, are a fault: every step makes progress."""
        able = [r for r in self.outputs if not r.paused and r not in self.held]
        if not able:
            self.progressed = self.clock()
        self.idle_steps = self.idle_steps + 1 if able else 1  # nobody's fault while everybody is paused or held
        if self.idle_steps < MAX_IDLE_STEPS:
            return []
        self.idle_steps = 0
        return self._fail(able, MinillmError(
            f"parts: the scheduler scheduled nothing in {MAX_IDLE_STEPS} steps, while {len(able)} requests could run"
        ))  # fmt: skip

    # Judging and recording ------------------------------------------------------------------------------------

    def _judge(self, out: SchedulerOutput) -> None:
        """A scheduler may be a learner's: what it returns would fail far from its cause, or not at all."""
        seen: set[Request] = set()
        for r, n in out.rows:
            if r not in self.outputs or r in seen:
                raise MinillmError(
                    f"parts: the scheduler scheduled request {r.request_id}, which has ended or is twice"
                )
            seen.add(r)
            if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= r.num_new_tokens:
                raise MinillmError(
                    f"parts: the scheduler gave request {r.request_id} {n!r} tokens; it is behind by {r.num_new_tokens}"
                )
            if self.cache is None or self.cache.promised:  # a static group takes what it was promised as it goes
                continue
            if len(r.block_ids) < (need := self.cache.blocks_for(r.num_computed_tokens + n)):
                raise MinillmError(
                    f"parts: the scheduler gave request {r.request_id} {len(r.block_ids)} blocks; its step needs {need}"
                )
        if self.max_tokens is not None and out.num_tokens > self.max_tokens and len(out.rows) > 1:
            raise MinillmError(
                f"parts: the scheduler gave a step {out.num_tokens} tokens; the budget is {self.max_tokens}"
            )

    def _record(self, rows: Sequence[tuple[str, int, int]], begun: float, scheduled: float) -> None:
        restore = None if self.cache is None else self.cache.restore
        if restore is not None and any(n > 1 for _, n, _ in rows):  # the cost model learns what computing costs here
            assert self.cache is not None
            settle(self.cache.pool)  # a chunk that draws no token has only been launched
            restore.observe_step([row[1:] for row in rows], self.clock() - begun - scheduled)
        if self.events.wanted:
            blocks: dict[str, Any] = {} if self.cache is None else {
                "free": self.cache.num_free, "cached": self.cache.num_cached, "live": self.cache.num_live,
            }  # fmt: skip
            self.events.record(
                "step", rows=rows, waiting=self.scheduler.num_waiting, running=len(self.scheduler.running), **blocks,
                seconds=self.clock() - begun, schedule_seconds=scheduled,
            )  # fmt: skip
        self.events.step += 1
