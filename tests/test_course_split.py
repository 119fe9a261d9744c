"""Exercise 15's machine beside the engine's own, and in a live split."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
from disagg_pair import GREEDY, PROMPT, Split, alone, save_words, until

from minillm import MinillmError
from minillm.cli import main
from minillm.cluster import transfer as t
from minillm.course import notebook as nbk
from minillm.course.adapters.split import mounted_transfer
from minillm.course.mount import load

ROOT = Path(__file__).parents[1]
SOLUTION = ROOT / "solutions" / "15_pd_split.ipynb"


@functools.cache
def solution():
    """The class of the solution notebook, and what it needs."""
    scope: dict = {}
    nb = nbk.read(SOLUTION)
    exec(nbk.source(next(c for c in nb["cells"] if c["id"] == "task-15-3")), scope)
    return scope["DecodeTransfer"]


class Ticket:
    attempt, epoch, token_hash, num_tokens = 1, "e", "h", 8

    def __init__(self, **other):
        self.__dict__.update(other)


def storm(rng):
    """Events of a good transfer, some lost, doubled, corrupt, or of another life, and some ends between them."""
    part = lambda layer, start, **o: t.PieceCame(t.Part(**{"attempt": 1, "epoch": "e", "layer": layer, "start": start,
                                                           "count": 4, **o}))  # fmt: skip
    events = [t.ReserveAsked(Ticket()), *(part(n, s) for n in (0, 1) for s in (0, 4)), t.DoneCame(1, "e")]
    odd = [
        t.ReserveAsked(Ticket(token_hash="other")), t.ReserveAsked(Ticket(num_tokens=4)),
        t.ReserveAsked(Ticket(attempt=0)), t.ReserveAsked(Ticket(), "another dtype"), part(0, 0, epoch="x"),
        part(1, 4, attempt=0), part(1, 0, intact=False), t.DoneCame(1, "x"), t.Refused(1, "no"), t.Refused(0, "no"),
        t.PeerLost(), t.Aborted(), t.Tick(), t.GaveWay(),
    ]  # fmt: skip
    for _ in range(rng.randrange(4)):
        kind = rng.randrange(3)
        i = rng.randrange(len(events))
        if kind == 0:
            events.insert(i, rng.choice(odd))
        elif kind == 1:
            events.insert(rng.randint(i, len(events)), events[i])
        elif len(events) > 1:
            del events[i]
    return events


def life(machine, events, rng):
    """What a driver would do: (kinds of actions at each event, where it ends). It answers `Reserve` at once."""
    done, now = [], 0.0

    def feed(event):
        for action in machine.feed(event, now):
            if isinstance(action, t.Reserve):
                feed(t.Room(found=rng.random() < 0.9))
            else:
                done.append(type(action).__name__ + (action.kind if isinstance(action, t.Send) else ""))

    for event in events:
        now += 1.0 if rng.random() < 0.97 else 30.0
        if isinstance(event, t.GaveWay) and not machine.holds_blocks:
            continue  # nobody says so to who holds nothing
        feed(event)
        done.append("|")
    now += 100.0
    feed(t.Tick())
    return done, str(machine.state)


def test_the_exercise_does_what_the_engine_does():
    """Up to whom a no is told: the exercise says "cancel" where the engine says "no_room", or nothing."""
    make = {"own": t.DecodeTransfer, "exercise": mounted_transfer(solution())}
    given = {"attempt": 1, "token_hash": "h", "num_tokens": 8, "num_layers": 2, "expires": 25.0}
    ends = set()
    for seed in range(600):
        events = storm(random.Random(seed))
        seen = {name: life(kind(**given), events, random.Random(seed)) for name, kind in make.items()}
        quiet = {
            name: ([[a for a in step.split() if not a.startswith("Send") or a in ("Sendreserved", "Sendack")]
                    for step in " ".join(done).split("|")], end)
            for name, (done, end) in seen.items()
        }  # fmt: skip
        for name, (steps, end) in quiet.items():
            quiet[name] = [sorted(step) for step in steps], end
        assert quiet["exercise"] == quiet["own"], (seed, events)
        ends.add(quiet["own"][1])
    assert ends == {"loaded", "recompute", "cancelled"}


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return save_words(tiny_folder, tmp_path_factory)


@pytest.fixture
def make(folder):
    made = []

    def build(kind, **options):
        made.append(split := Split(folder, **options))
        split.remote.machine = mounted_transfer(kind)
        return split.ready()

    yield build
    for split in made:
        split.close()


def test_it_runs_in_a_live_split(make, folder):
    split = make(solution())
    assert split.tokens() == alone(folder, [PROMPT], GREEDY)[0]
    assert split.outcomes == {("loaded", ""): 1}
    split.settled()


@pytest.fixture(scope="module")
def live(folder):
    """(a live split for many machines, the tokens that it must give)."""
    split = Split(folder).ready()
    yield split, alone(folder, [PROMPT], GREEDY)[0]
    split.close()


def used(split, kind, tokens):
    """How the transfer ended that this machine was asked about. The answer is right, and nothing is left of it."""
    split.remote.stats.outcomes.clear()
    split.remote.machine = mounted_transfer(kind)
    assert tokens() == split.want
    split.settled()
    return split.outcomes


def mutant(event, answer=None, state=None, **other):
    """The solution's class, which says something else at one kind of event: `answer(what it would have said)`, and is
    in another state afterwards."""

    class Mutant(solution()):
        def feed(self, said, now):
            got = super().feed(said, now)
            if said["what"] != event:
                return got
            self.state = state or self.state
            return got if answer is None else answer(got)

    for name, value in other.items():
        setattr(Mutant, name, value)
    return Mutant


def slip(*_):
    raise RuntimeError("a slip")


WRONG = {
    "it raises": (mutant("piece", slip), "RuntimeError: a slip"),
    "in reserve": (mutant("reserve", slip), "RuntimeError: a slip"),
    "in done": (mutant("done", slip), "RuntimeError: a slip"),
    "it cannot be made": (mutant("", __init__=slip), "cannot be made: RuntimeError: a slip"),
    "it cannot be copied": (mutant("", __deepcopy__=slip), "RuntimeError: a slip"),
    "no list": (mutant("piece", lambda got: None), "TypeError"),
    "a number": (mutant("piece", lambda got: [7]), "TypeError"),
    "no action": (mutant("piece", lambda got: [("dance",)]), "('dance',) is no action"),
    "an empty action": (mutant("piece", lambda got: [()]), "() is no action"),
    "no such message": (mutant("piece", lambda got: [("send", "love")]), "is no action"),
    "no such state": (mutant("piece", state="lost"), "state is one of submitted,"),
    "a state that is none": (mutant("piece", state=[1]), "state is one of submitted,"),
    "it resumes too early": (mutant("piece", lambda got: [*got, ("resume", 64)], "loaded"), "not every token of every"),
    "it resumes with less": (mutant("done", lambda got: [("resume", 48)]), "says 64"),
    "with a text": (mutant("done", lambda got: [("resume", "64")]), "says 64"),
    "twice": (mutant("done", lambda got: got * 2), "'loaded' comes with one resume"),
    "never": (mutant("done", lambda got: []), "'loaded' comes with one resume"),
    "and goes on": (mutant("done", state="receiving"), "no other state with either"),
    "it is cancelled by nobody": (mutant("done", lambda got: [], "cancelled"), "of nobody else"),
    "it keeps its blocks": (mutant("piece", lambda got: [("recompute",)], "recompute"), "keeps its blocks"),
    "it takes no blocks": (mutant("reserve", state="submitted"), "does not hold them"),
    "it takes what nobody gave": (mutant("reserve", lambda got: []), "blocks that it was not given"),
    "it writes elsewhere": (mutant("piece", lambda got: [("write", 0, 32, 64)]), "the piece that has come"),
    "it writes nothing": (mutant("piece", lambda got: []), "not every token of every"),
    "it writes what is not there": (mutant("done", lambda got: [("write", 0, 0, 64), *got]), "the piece that has come"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_that_raises_or_makes_no_sense_is_named_and_the_engine_goes_on(live, caplog, name):
    split, split.want = live
    kind, words = WRONG[name]
    assert used(split, kind, split.tokens) == {("recompute", "fault"): 1}
    assert "DecodeTransfer of exercise 15.3" in caplog.text
    assert words in caplog.text
    assert used(split, solution(), split.tokens) == {("loaded", ""): 1}


def test_an_answer_that_forgets_its_lease_is_named_when_that_is_over(make, folder, caplog):
    """Its line says nothing more; the machine would wait for ever."""
    split = make(mutant("", expires=property(lambda self: 1e12, lambda self, value: None)), faults_p={1: "drop"})
    with ThreadPoolExecutor(1) as pool:
        tokens = pool.submit(split.tokens)
        until(lambda: split.wires[0][0].struck)
        split.d.call(lambda: [setattr(own.machine, "expires", -1.0) for own in split.remote.under_way.values()])
        assert tokens.result(20) == alone(folder, [PROMPT], GREEDY)[0]
    assert split.outcomes == {("recompute", "fault"): 1}
    assert "its lease is over, and it goes on" in caplog.text
    split.settled()


@pytest.mark.parametrize("kind", [mutant("aborted", slip), mutant("aborted", lambda got: [], "reserved")])
def test_a_client_leaves_and_the_answer_does_not_let_go(make, kind):
    split = make(kind, faults_d={1: "delay"})  # blocks are held, and P has not heard

    async def run():
        stream = split.d.generate(PROMPT, GREEDY)
        task = asyncio.create_task(anext(stream))
        while not split.wires[0][1].struck:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()

    asyncio.run(run())
    split.wires[0][1].release()
    split.settled()
    assert split.outcomes == {("cancelled", ""): 1}


# From a notebook -----------------------------------------------------------------------------------------------------


def test_the_notebook_mounts_in_a_live_split(live):
    mounted = load(SOLUTION)
    assert mounted.names == {"transfer": "15.3 DecodeTransfer"}
    assert list(mounted.server) == ["transfer"]
    split, want = live
    split.remote.stats.outcomes.clear()
    split.remote.machine = mounted.server["transfer"]
    assert split.tokens() == want
    split.settled()
    assert split.outcomes == {("loaded", ""): 1}


def test_a_fresh_exercise_has_nothing_to_mount():
    with pytest.raises(MinillmError, match=r"nothing to mount: 15\.3 DecodeTransfer is not written yet"):
        load(ROOT / "exercises" / SOLUTION.name)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["serve", "--port", "0"], "15.3 DecodeTransfer receives KV from a prefill server"),
        (["serve", "--port", "0", "--role", "prefill"], "15.3 DecodeTransfer receives KV from a prefill server"),
        (["generate", "w1"], "the transfer is a part of the server"),
    ],
    ids=["both", "prefill", "generate"],
)
def test_who_receives_no_kv_refuses_it_in_words(command, words, capsys):
    assert main([*command, "--use", str(SOLUTION)]) == 2
    assert words in capsys.readouterr().err


def test_a_split_serves_with_it(folder):
    """Real processes: the line that says what is mounted, an answer over a transfer, and nothing in the log of it."""
    flags = ["--port", "0", "--dtype", "float32", "--num-kv-blocks", "64", "--max-model-len", "192", "--threads", "1"]
    command = ["serve", "--model", str(folder), "--split", "1p1d", "--json", "--use", str(SOLUTION), *flags]
    with subprocess.Popen(
        [sys.executable, "-m", "minillm", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            lines = [process.stdout.readline() for _ in range(2)]
            assert all(lines), process.communicate()[1]
            said, ready = map(json.loads, lines)
            assert said["parts"] == {"transfer": "15.3 DecodeTransfer"}
            body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
            ask = urllib.request.Request(
                ready["url"] + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(ask, timeout=120) as reply:
                assert json.load(reply)["choices"][0]["token_ids"] == alone(folder, [PROMPT], GREEDY)[0]
            with urllib.request.urlopen(ready["url"] + "/metrics") as reply:
                (told,) = [x for x in reply.read().decode().splitlines() if x.startswith("minillm:kv_transfers_total")]
            assert 'outcome="loaded"' in told
        finally:
            process.terminate()
            _, log = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "exercise 15.3" not in log
