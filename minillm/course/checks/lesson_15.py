"""Checks of exercise 15: the prefill/decode split.

References and mistakes are in tickets.py, transfers.py, transfer_slips.py, storms.py, leases.py and split_cost.py.
"""

from __future__ import annotations

from functools import partial

from minillm.course.adapters import split
from minillm.course.checks import leases as lent
from minillm.course.checks import split_cost as cost
from minillm.course.checks import tickets
from minillm.course.checks import transfer_slips as slip
from minillm.course.checks import transfers as line
from minillm.course.checks.split_cost import (
    compared,
    even,
    inputs,
    situation,
    table,
    uneven,
)
from minillm.course.checks.storms import stormy
from minillm.course.checks.tickets import asked, judge_with, judged, ticket, want
from minillm.course.checks.transfers import (
    ABORTED,
    ALL,
    GAVE_WAY,
    LEASE,
    LOST,
    TICK,
    before_each,
    done,
    piece,
    play,
    quick,
    refused,
    reserve,
    scripts,
)  # fmt: skip
from minillm.course.tasks import Answer, Case, Lesson, Mistake, Part, Task, prediction

# 15.1 the prediction: 8e9 parameters, 32 layers, 8 KV heads of 128, 2 bytes; 8,000 tokens at 400 TFLOP/s.
KV = 2 * 32 * 8 * 128 * 2 * 8000
PREFILL_S = 2 * 8e9 * 8000 / 400e12
FAST, SLOW = 400e9 / 8, 25e9 / 8
EXPOSED_S = PREFILL_S / 32 + KV / SLOW - PREFILL_S
PER_DECODE = 64 / (250 * 0.02) * PREFILL_S

GOOD = quick(*ALL)
PAIRS = [(ticket(), want()), (ticket(epoch="b8"), want(None)), (ticket(num_tokens=1), want()),
         (ticket(num_tokens=4), want(tokens=[*tickets.TOKENS[:4], 9, 9]))]  # fmt: skip

LESSON = Lesson(
    "15",
    "pd_split",
    [
        prediction(
            "15.1",
            "Predict bytes, seconds and the break-even",
            [
                Answer("kv_mb", KV / 1e6, "MB", rel=0.002,
                       why="keys and values: 2 x layers x KV heads x head_dim x bytes for each token",
                       hint="2 x 32 x 8 x 128 x 2 bytes a token, 8,000 of them",
                       slips={0.5: "keys and values: two of them", 1e6 / 2**20: "that is in MiB (2^20 bytes)",
                              4.0: "KV heads, not query heads"}),
                Answer("fast_ms", 1e3 * KV / FAST, "ms", rel=0.002, why="bytes over bandwidth",
                       hint="400 Gb/s are 50 GB/s",
                       slips={1 / 8: "lines are sold in bits a second: eight to a byte", 1e-3: "in ms"}),
                Answer("slow_ms", 1e3 * KV / SLOW, "ms", rel=0.002, why="bytes over bandwidth",
                       hint="25 Gb/s are 3.125 GB/s",
                       slips={1 / 8: "lines are sold in bits a second: eight to a byte", 1e-3: "in ms"}),
                Answer("break_even_gb_s", KV / PREFILL_S / 1e9, "GB/s", rel=0.002,
                       why="there both take the same time",
                       hint="all bytes over the time to compute the prompt: 2 x 8e9 x 8000 FLOP at 400e12 FLOP/s",
                       slips={8.0: "GB/s are bytes, not bits", 2.0: "a multiplication and an addition: two FLOPs a "
                              "parameter and token"}),
                Answer("exposed_ms", 1e3 * EXPOSED_S, "ms", rel=0.005, points=2,
                       why="the line begins when the first layer is done, and since a layer takes longer to send than "
                           "to compute, it never rests again",
                       hint="the last byte arrives after one layer's compute and the whole transfer",
                       slips={KV / SLOW / EXPOSED_S: "that is without overlap: the line begins after the first layer",
                              KV / SLOW / 32 / EXPOSED_S: "one layer is left only where the line keeps pace; this one "
                                                          "falls behind with each layer",
                              (KV / SLOW - PREFILL_S) / EXPOSED_S: "the line cannot begin before the first layer is "
                                                                   "computed"}),
                Answer("prefills_per_decode", PER_DECODE, "engines", rel=0.005,
                       why="a decode engine ends 64 streams every 250 x 20 ms; each needs a prompt first",
                       hint="requests a second that one decode engine takes, times seconds of a prompt",
                       slips={1 / 64: "64 streams run at once", 1 / PER_DECODE**2: "the other way round",
                              250.0: "a stream lasts for all of its 250 tokens"}),
            ],
        ),
        Task(
            "15.2", "judge", "Judge a ticket", tickets.judge,
            [
                Case("as it is", asked(*PAIRS), run=judged,
                     why="a ticket that fits is loaded; the first one of a transfer brings the epoch"),
                Case("of another life",
                     asked((ticket(attempt=1), want()), (ticket(epoch="b8"), want()),
                           (ticket(request_id="r-2"), want()), (ticket(attempt=1, epoch="b8"), want()),
                           (ticket(attempt=3), want(None)),
                           (ticket({"dtype": "float16"}, attempt=1, token_hash="0"), want())),
                     run=judged, points=2,
                     why="a message of an earlier attempt, or of a process that has died, says nothing about this "
                         "request: drop it and wait on"),
                Case("of another prompt",
                     asked((ticket(token_hash=tickets.token_hash([1, 2])), want()),
                           (ticket(token_hash=tickets.token_hash(sorted(tickets.TOKENS))), want()),
                           (ticket(token_hash=tickets.token_hash(tickets.TOKENS)), want()),
                           (ticket({"block_size": 32}, token_hash="0"), want())),
                     run=judged, points=2,
                     why="KV of another prompt makes a fluent answer to another prompt; nothing else would notice"),
                Case("too many tokens, too few",
                     asked(*((ticket(num_tokens=n), want()) for n in (9, 10, 0, 8))),
                     run=judged, why="one token must be computed here, or there are no logits to draw from"),
                Case("another model, another layout",
                     asked((ticket({"model": "77aa"}), want()), (ticket({"dtype": "float16"}), want()),
                           (ticket({"kv_dtype": "int8", "num_kv_heads": 4}), want()),
                           (ticket({"head_dim": 64, "num_layers": 28, "block_size": 32}), want())),
                     run=judged, points=2,
                     why="what cannot be read is refused in words that say what differs, and how"),
                Case("cut in another way",
                     asked((ticket({"block_size": 32}), want()), (ticket({"tp_size": 2}), want()),
                           (ticket({"block_size": 8, "tp_size": 4}), want()), (ticket(), want(block_size=256)),
                           (ticket({"block_size": 48}), want(block_size=32))),
                     run=judged, points=2, why="blocks and shards are only how the same numbers are cut"),
            ],
            mistakes=[
                Mistake("the attempt: an earlier try of this request may still send", partial(
                    judge_with, whose=("request_id", "epoch"))),
                Mistake("the epoch: a process that died and came back is somebody else", partial(
                    judge_with, whose=("request_id", "attempt"))),
                Mistake("whose is it? the request_id", partial(judge_with, whose=("attempt", "epoch"))),
                Mistake("while no epoch is accepted (None), any will do", partial(judge_with, any_epoch=False)),
                Mistake("a stale message is dropped, and the request waits on: it is no reason to give up", partial(
                    judge_with, stale="refuse")),
                Mistake("the hash of the tokens is not looked at: this is another prompt's KV", partial(
                    judge_with, tokens=False)),
                Mistake("it never fits: of the first num_tokens, 8 bytes a token, signed, little-endian", partial(
                    judge_with, hashed=partial(tickets.token_hash, width=4))),
                Mistake("a prompt may be moved in part: from 1 token to all but one", partial(
                    judge_with, all_but_one=True)),
                Mistake("the last token must be computed here: at most all but one", partial(judge_with, leaves=0)),
                Mistake("no tokens at all are nothing to load", partial(judge_with, least=0)),
                Mistake("another block size or TP degree can be re-laid out", partial(judge_with, relay="refuse")),
                Mistake("any block size can be re-laid out, not a multiple only: pieces are cut by tokens", partial(
                    judge_with, multiples=True)),
                Mistake("these numbers lie in another way: they must be re-laid out first", partial(
                    judge_with, laid=())),
                Mistake("kv_dtype: eight bits read as sixteen are noise", partial(
                    judge_with, fixed=tuple(n for n in tickets.FIXED if n != "kv_dtype"))),
                Mistake("the model: the same shapes with other weights are other keys", partial(
                    judge_with, fixed=tuple(n for n in tickets.FIXED if n != "model"))),
                *(Mistake(f"{name} differs, and nothing can re-lay that: compare it", partial(
                    judge_with, fixed=tuple(n for n in tickets.FIXED if n != name)))
                  for name in ("dtype", "num_layers", "num_kv_heads", "head_dim")),
                Mistake("there is the ticket's side, here is want's", partial(judge_with, swapped=True)),
                Mistake("say all that differs, not the first only", partial(judge_with, first_only=True)),
                Mistake("say both values: what is there, and what is here", partial(judge_with, values=False)),
            ],
        ),
        Task(
            "15.3", "DecodeTransfer", "The decode side of a transfer", line.DecodeTransfer,
            [
                Case("all goes well",
                     scripts(GOOD, quick(reserve(), *(piece(n, s, 4) for n in (0, 1) for s in (0, 4)), TICK, done()),
                             quick(reserve(), *(piece(n, s, 2) for s in (0, 2, 4, 6) for n in (0, 1)), done()),
                             quick(reserve()), quick(reserve(), piece(0, 0, 4))),
                     run=play, why="reserve, receive, resume; the pieces may come layer by layer or chunk by chunk"),
                Case("an end at every stage", scripts(*before_each(LOST, refused(), ABORTED, GAVE_WAY)[:-4]), run=play,
                     points=3, why="whatever is held is given back, and whoever waits is told, once"),
                Case("not what was promised",
                     scripts(quick(reserve(token_hash="0000"), *ALL[1:]), quick(reserve(num_tokens=12), *ALL[1:]),
                             quick(reserve(room=False), *ALL[1:]),
                             quick(reserve(), piece(0, ok=False), piece(1), done()), quick(reserve(), piece(0),
                             done(), piece(1)), quick(reserve(), piece(1), done()),
                             quick(reserve(), piece(0, 0, 4), piece(0, 6, 2), piece(1), done()),
                             quick(reserve(), piece(0, 0, 4), piece(0, 0, 4, ok=False), piece(0, 4, 4), piece(1),
                                   done())),
                     run=play, points=3, why="`done` is believed only when everything is there, and right"),
                Case("of another life",
                     scripts(quick(reserve(attempt=1), *ALL), quick(reserve(), piece(0, attempt=1), piece(1), done()),
                             quick(reserve(), piece(0), piece(1, epoch="b8"), done(epoch="b8"), piece(1), done()),
                             quick(refused(attempt=1), *ALL), quick(piece(0), *ALL),
                             quick(reserve(), piece(0), reserve(epoch="b8"), piece(1), done())),
                     run=play, points=3,
                     why="a stale message changes nothing; the one that we wait for may still come"),
                Case("twice",
                     scripts(quick(*(e for e in ALL for _ in (0, 1))), quick(*ALL, *ALL),
                             quick(reserve(), piece(0, 0, 4), piece(0, 0, 4), piece(1), done())),
                     run=play, points=2, why="a message that comes again must not hold, count or resume again"),
                Case("the lease",
                     scripts([*quick(reserve(), piece(0)), (LEASE, piece(1)), (LEASE + 1, done())],
                             [(LEASE - 0.5, reserve()), (LEASE, TICK)], [(LEASE, reserve()), (LEASE + 1, piece(0))],
                             [*quick(*ALL[:2]), (LEASE, piece(1, attempt=1)), (LEASE + 1, TICK)],
                             [*quick(*ALL[:3]), (LEASE + 1, done())], [(LEASE + 3, ABORTED), (LEASE + 4, TICK)],
                             [*quick(*[TICK] * 12), (LEASE, TICK)], [*GOOD, (LEASE + 1, TICK)]),
                     run=play, points=3, why="after the lease nothing is held and nothing is written, whatever comes"),
                Case("after the resume", scripts(*(quick(*ALL, e) for e in (LOST, refused(), ABORTED, GAVE_WAY))),
                     run=play, points=2, why="tokens have been sent by now: nothing may start the request again"),
                Case("two hundred storms", lambda: (15, 200), run=stormy, points=3,
                     why="one outcome for each request, and nothing held afterwards, whatever the line does"),
            ],
            rel=0.0, abs=0.0, limit_s=10,
            mistakes=slip.MISTAKES,
        ),
        Task(
            "15.4", "Leases", "A lease keeper", lent.Leases,
            [
                Case("lent and given back",
                     lent.calls(10, ("grant", "a", 1, 6, 5.0, 0.0), ("grant", "b", 1, 6, 5.0, 1.0), ("release", "a", 1),
                                ("grant", "b", 1, 6, 5.0, 2.0), ("release", "c", 1), ("release", "b", 1),
                                ("release", "b", 1), ("grant", "c", 1, 10, 1.0, 3.0)),
                     run=lent.play, why="all of it, or nothing; given back once"),
                Case("its time is over",
                     lent.calls(10, ("grant", "b", 1, 4, 5.0, 0.0), ("grant", "a", 1, 4, 5.0, 0.0),
                                ("grant", "c", 1, 2, 9.0, 1.0), ("valid", "a", 1, 4.5), ("valid", "a", 1, 5.0),
                                ("expire", 4.5), ("expire", 5.0),
                                ("valid", "b", 1, 5.0), ("release", "b", 1), ("valid", "c", 1, 10.0),
                                ("release", "c", 1), ("expire", 10.0)),
                     run=lent.play, points=2, why="at its end a lease is over, for each of them"),
                Case("a grant looks at the clock",
                     lent.calls(8, ("grant", "a", 1, 8, 2.0, 0.0), ("grant", "b", 1, 5, 2.0, 1.0),
                                ("grant", "b", 1, 5, 2.0, 2.0), ("grant", "a", 1, 3, 2.0, 3.0), ("expire", 4.0),
                                ("grant", "a", 1, 8, 2.0, 6.0)),
                     run=lent.play, why="room whose lease is over is free, whether anybody called `expire` or not"),
                Case("renewed by its own progress",
                     lent.calls(8, ("grant", "a", 2, 4, 3.0, 0.0), ("renew", "a", 2, 3.0, 2.0),
                                ("renew", "a", 1, 3.0, 2.5),
                                ("renew", "b", 1, 3.0, 2.5), ("valid", "a", 2, 4.5), ("valid", "a", 2, 5.5),
                                ("renew", "a", 2, 3.0, 5.0), ("expire", 5.0), ("renew", "a", 2, 3.0, 5.5),
                                ("grant", "b", 1, 4, 9.0, 6.0), ("renew", "b", 1, 1.0, 7.0), ("valid", "b", 1, 8.0)),
                     run=lent.play, points=2,
                     why="a stale message must not keep blocks alive, and a lease that is over stays over: its blocks "
                         "may be somebody else's"),
                Case("twice, and out of order",
                     lent.calls(9, ("grant", "a", 2, 4, 3.0, 0.0), ("grant", "a", 2, 4, 3.0, 2.0), ("expire", 3.5),
                                ("grant", "a", 2, 4, 3.0, 4.0), ("grant", "a", 1, 2, 3.0, 4.5), ("release", "a", 1),
                                ("valid", "a", 1, 5.0), ("grant", "a", 3, 9, 3.0, 5.0), ("release", "a", 2),
                                ("grant", "a", 4, 12, 3.0, 5.5), ("valid", "a", 3, 5.5)),
                     run=lent.play, points=2,
                     why="a message that comes twice holds once; a later attempt takes the place of an earlier one"),
                Case("both sides, over a bad line", lambda: (4, 600), run=lent.both_sides, points=2,
                     why="blocks on one side, bytes on the other, and a line that loses what would have freed them"),
            ],
            rel=0.0, abs=0.0, limit_s=10,
            mistakes=[
                Mistake("all or nothing: who gets False holds nothing", lent.leases(all_or_nothing=False)),
                Mistake("what has expired is free again: give its room back", lent.Forgets),
                Mistake("`expire` takes back, it does not only tell", lent.leases(returns=False)),
                Mistake("`grant` first takes back what is over", lent.OnlyWhenAsked),
                Mistake("at its end a lease is over: now < end", lent.leases(inclusive=False)),
                Mistake("`valid` looks at the clock: a late piece would be written into somebody else's blocks",
                        lent.leases(asks_clock=False)),
                Mistake("only the attempt that holds it can renew it", lent.leases(fences_renew=False)),
                Mistake("only the attempt that holds it can give it back: these are somebody else's blocks",
                        lent.leases(fences_release=False)),
                Mistake("a lease that is over stays over", lent.leases(revives=True)),
                Mistake("it ends at now + seconds, even if that is sooner", lent.leases(shortens=False)),
                Mistake("all that is over at that time, not one of them", lent.leases(all_late=False)),
                Mistake("the keys of what is over, sorted", lent.leases(orders=False)),
                Mistake("just what is free can be lent", lent.leases(last_one=False)),
                Mistake("it ends at now + seconds, not that much later than before", lent.leases(adds=True)),
                Mistake("the same grant twice: nothing changes, not even the time", lent.leases(prolongs=True)),
                Mistake("a later attempt takes the place of an earlier one", lent.leases(newer=False)),
                Mistake("an earlier attempt has no say: compare attempts", lent.leases(fenced=False)),
                Mistake("the same grant twice: nothing changes, not even the time", lent.leases(once=False)),
            ],
        ),
        Task(
            "15.5", "timetable", "What the overlap hides", cost.timetable,
            [
                Case("a line that keeps pace",
                     inputs(even(4, 2**-7, 4096, 2.0**20), even(8, 2**-7, 4096, 2.0**21), uneven(1, 5, 8.0)), run=table,
                     why="all but the last layer leaves while the card computes"),
                Case("a line that does not", inputs(even(4, 2**-7, 16384, 2.0**20), uneven(2, 6, 0.5),
                            uneven(3, 8, 0.25)), run=table, points=2,
                            why="the line is busy from the first layer on; pieces wait for each other"),
                Case("a latency", inputs(even(4, 2**-7, 4096, 2.0**20, 2**-5), uneven(4, 6, 1.0, 2**-6)), run=table,
                     points=2, why="the line carries the next piece while this one is on its way"),
                Case("a small buffer", inputs(even(6, 2**-8, 16384, 2.0**20, 0.0, 2), uneven(5, 8, 0.5, 0.0, 1),
                                              uneven(6, 8, 0.5, 2**-7, 3), uneven(7, 6, 1.0, 2**-6, 1)), run=table,
                                              points=2,
                     why="back-pressure: the compute waits, and its reader waits too"),
                Case("one layer", inputs(even(1, 2**-6, 4096, 2.0**20, 2**-8), even(1, 2**-6, 8192, 2.0**20, 0.0, 1)),
                     run=table, why="nothing overlaps with nothing"),
            ],
            rel=1e-9, abs=1e-12,
            mistakes=cost.TIMETABLE_MISTAKES,
        ),
        Task(
            "15.6", "compare", "When it pays", cost.compare,
            [
                Case("tight and busy", inputs(situation(), situation(16), situation(4, load={"prompt": 8192})),
                     run=compared, points=2,
                     why="long prompts, tight steps, a quick line: here a split is worth its machinery"),
                Case("low load", inputs(situation(load={"rate": 3.0}), situation(load={"rate": 45.0}),
                                        situation(load={"rate": 60.0})), run=compared, points=2,
                     why="who serves all that comes gains nothing by a split: equal means co-locate"),
                Case("short prompts", inputs(situation(load={"prompt": 128}),
                                             situation(load={"prompt": 32, "output": 1024}),
                                             situation(slo={"itl_s": 0.05})), run=compared,
                     why="what hardly interferes need not be moved; neither need it where steps may be long"),
                Case("a slow line", inputs(situation(link=3e9), situation(link=12.5e9), situation(link=1e8),
                                           situation(link=16 * 2048 * 131072.0, load={"rate": 16.0})),
                     run=compared, points=2,
                     why="the line is one more engine in the row, and every prompt goes through it"),
                Case("a small pool", inputs(situation(1), situation(2, load={"output": 1024}),
                                            situation(8, load={"output": 1024}), situation(3)), run=compared,
                     points=2, why="engines come whole: half of one cannot be lent to the other side"),
                Case("a promise that cannot be kept",
                     inputs(situation(slo={"itl_s": 0.005}), situation(slo={"ttft_s": 0.045}),
                            situation(link=2e8, slo={"ttft_s": 0.5})), run=compared, points=2,
                     why="no goodput at all, and it says what is in the way"),
                Case("thirty at random", lambda: (cost.random_situations(15, 30),), run=compared, points=2,
                     why="any of the bounds may be the tight one"),
            ],
            rel=1e-9, abs=0.0,
            mistakes=cost.COMPARE_MISTAKES,
        ),
    ],
    parts=[Part("transfer", "15.3", split.transfer, server=True)],
)  # fmt: skip
