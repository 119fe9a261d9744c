"""Checks of exercise 09: continuous batching. References and mistakes are in batching.py and batch_loop.py."""

from __future__ import annotations

from functools import partial

from minillm.course.adapters import serving
from minillm.course.checks import batch_loop as loop
from minillm.course.checks import batching as b
from minillm.course.tasks import Answer, Case, Lesson, Mistake, Part, Task, prediction

# 09.1 the prediction: twelve answers at four places; a step takes 20 ms and 1 ms for each request in it.
LENGTHS, SEATS = (9, 2, 3, 2, 2, 8, 3, 2, 3, 2, 2, 10), 4
TOKENS = sum(LENGTHS)
STATIC, CONTINUOUS = (max(loop.last_steps(LENGTHS, SEATS, how)) for how in (False, True))
TIMES = [20 * steps + TOKENS for steps in (STATIC, CONTINUOUS)]
RATIO = TIMES[0] / TIMES[1]
EMPTY = 100 * (1 - TOKENS / (STATIC * SEATS))

# lengths of answers, places
EVEN = [([4] * 8, 4), ([3, 3], 2)]
MIXED = [([5, 1, 1, 1, 1, 1], 2), ([2, 7, 2, 2, 2, 2], 3), (list(LENGTHS), SEATS)]
EDGES = [([4, 2], 5), ([3, 1, 2], 1), ([6], 3)]

CROWD = [("a", 0.0, 2), ("b", 4.0, 0), ("c", 5.0, 1), ("d", 9.0, 0), ("e", 9.0, -1), ("f", 30.0, 0)]


LESSON = Lesson(
    "09",
    "continuous_batching",
    [
        prediction(
            "09.1",
            "Predict the steps and the time",
            [
                Answer("static_steps", STATIC, "steps", rel=0.0,
                       why="a group takes as many steps as its longest answer",
                       hint="the maximum of each four, added",
                       slips={TOKENS / SEATS / STATIC: "tokens over places: then no place would ever be empty",
                              10 * 3 / STATIC: "each group waits for its own longest answer",
                              (STATIC + 12 - 3) / STATIC: "a prompt takes no extra step: it gives the first token"}),
                Answer("empty_percent", EMPTY, "percent", rel=0.005,
                       why="steps times places, less the tokens that were generated, as a share",
                       hint="100 x (1 - tokens / (steps x places))",
                       slips={0.01: "in percent, not as a share",
                              (100 - EMPTY) / EMPTY: "that is the share of the places that are taken"}),
                Answer("continuous_steps", CONTINUOUS, "steps", rel=0.0,
                       why="each free place goes to the next in the queue; the last answer begins late and is long",
                       hint="keep the step in which each place is free; the next request takes the smallest",
                       slips={TOKENS / SEATS / CONTINUOUS: "tokens over places is the lower bound: at the end places "
                                                           "are empty all the same",
                              (TOKENS / SEATS + 10) / CONTINUOUS: "that is Graham's upper bound; count the schedule"}),
                Answer("time_ratio", RATIO, "static over continuous", rel=0.005,
                       why="20 ms for each step, and 1 ms for each token, which are as many both ways",
                       hint="20 x steps + tokens, one over the other",
                       slips={STATIC / CONTINUOUS / RATIO: "that is the ratio of the steps; a step also takes 1 ms for "
                                                           "each request that is in it, and none for an empty place",
                              1 / RATIO**2: "static over continuous, not the other way round"}),
                Answer("overtaken_until_s", 160, "s", rel=0.0,
                       why="a newcomer goes first while its arrival is below 100 + 3 x 20",
                       hint="arrival + priority x ageing is the key of both",
                       slips={60 / 160: "that is how long after its arrival; asked for is the second on the clock",
                              40 / 160: "the ageing counts in its favour later, not earlier: 100 + 60"}),
            ],
        ),
        Task(
            "09.2", "WaitingQueue", "A queue that ages", b.WaitingQueue,
            [
                Case("first come, first served", b.crowd(10.0, [("a", 3.0, 0), ("b", 1.0, 0), ("c", 2.0, 0)]),
                     run=b.queue_play, why="equal priorities: the arrival decides"),
                Case("priorities", b.crowd(10.0, CROWD), run=b.queue_play, points=2,
                     why="the key is arrival + priority x ageing: smaller is served first",
                     hint="a request of priority 2 ranks as if it had come 2 x ageing seconds later"),
                Case("a stream of urgent requests", b.stream(4.0, 3, 20), run=b.queue_play, points=2,
                     why="whoever arrives more than 3 x ageing seconds later must wait behind it"),
                Case("equal keys", b.crowd(5.0, [("z", 0.0, 1), ("y", 5.0, 0), ("x", 10.0, -1), ("a", 5.0, 0)]),
                     run=b.queue_play, why="among equal keys the one that was pushed first",
                     hint="a counter as the second part of the heap's entry"),
                Case("cancelled, and queued again",
                     lambda: (8.0, [("push", "a", 0.0, 0), ("push", "b", 1.0, 0), ("push", "c", 2.0, 0),
                                    ("remove", "a"), ("remove", "nobody"), ("pop",), ("push", "b", 1.0, 0), ("pop",),
                                    ("pop",), ("pop",), ("remove", "c"), ("push", "a", 0.0, 0), ("pop",)]),
                     run=b.queue_play, points=2,
                     why="who was removed is never served; who has left may come again (a preempted request does)"),
                Case("queued twice",
                     lambda: (8.0, [("push", "a", 0.0, 0), ("push", "a", 0.0, -5), ("push", "b", 3.0, 0), ("pop",),
                                    ("pop",), ("pop",)]),
                     run=b.queue_play, points=2,
                     why="a request that is in the queue twice is computed twice in one step"),
            ],
            rel=0.0, abs=0.0,
            mistakes=[
                Mistake("starvation: waiting must make up for priority, arrival + priority x ageing", b.Starves),
                Mistake("the priority is not read", b.NoPriority),
                Mistake("smaller priority first, as in vLLM", b.LargerFirst),
                Mistake("one step of priority is worth `ageing_s` seconds: multiply, do not divide", b.Divides),
                Mistake("among equal keys the first pushed goes first", b.NewestOfEqual),
                Mistake("queued twice: raise ValueError for a name that is in the queue", b.QueuesTwice),
                Mistake("who has been popped or removed is not in the queue any more and may come again",
                        b.NeverForgets),
                Mistake("who was removed is served all the same", b.KeepsRemoved),
            ],
        ),
        Task(
            "09.3", "Scheduler", "Joining and leaving", b.Scheduler,
            [
                Case("a full batch, a free place",
                     lambda: (2, 99, [("add", "a", 1.0, 5, 1), ("add", "b", 2.0, 3, 1), ("add", "c", 3.0, 4, 1),
                                      ("step",), ("step",), ("finish", "a"), ("step",), ("finish", "c"), ("step",),
                                      ("finish", "b"), ("step",)]),
                     run=b.scheduler_play, points=3,
                     why="the place of a finished request goes to the next one, whatever the others do"),
                Case("the order of the keys",
                     lambda: (2, 99, [("add", "c", 7.0, 2, 1), ("add", "a", 9.0, 2, 1), ("add", "b", 4.0, 6, 1),
                                      ("step",), ("add", "d", 1.0, 6, 1), ("step",), ("finish", "c"), ("step",)]),
                     run=b.scheduler_play,
                     why="the smaller key joins first, and `running` is in that order too, however it came about"),
                Case("memory for some",
                     lambda: (4, 6, [("add", "a", 1.0, 5, 3), ("add", "big", 2.0, 9, 5), ("add", "small", 3.0, 1, 1),
                                     ("step",), ("step",), ("finish", "a"), ("step",), ("finish", "big"), ("step",)]),
                     run=b.scheduler_play, points=2,
                     why="the first that finds no room stays first, and nobody behind it overtakes: else it starves"),
                Case("gone, wherever it was",
                     lambda: (2, 99, [("add", "a", 1.0, 5, 1), ("add", "b", 2.0, 5, 1), ("add", "c", 3.0, 5, 1),
                                      ("step",), ("finish", "c"), ("finish", "c"), ("finish", "a"), ("step",),
                                      ("finish", "b"), ("step",), ("add", "d", 4.0, 2, 1), ("step",)]),
                     run=b.scheduler_play, points=2,
                     why="a request may be cancelled while it waits, and be finished twice"),
                Case("added twice",
                     lambda: (2, 99, [("add", "a", 1.0, 5, 1), ("add", "a", 1.0, 5, 1), ("step",),
                                      ("add", "a", 0.0, 5, 1), ("step",)]),
                     run=b.scheduler_play, why="a request is known once: waiting or running"),
                Case("in an engine of shadows, with memory for all", lambda: (range(6), True), run=b.schedules,
                     points=2,
                     why="random arrivals, lengths, priorities and cancellations over a model that checks every slot"),
                Case("in an engine of shadows, with little memory", lambda: (range(20, 28), False), run=b.schedules,
                     points=2, why="the same over pools of a few blocks"),
            ],
            rel=0.0, abs=0.0,
            mistakes=[
                Mistake("static batching: a free place is given away at once, not when all have left", b.Static),
                Mistake("a finished request stays in the batch", b.KeepsFinished),
                Mistake("a request that still waits can be finished too: take it out of the queue",
                        b.FinishesRunningOnly),
                Mistake("raise ValueError for a request that waits or runs already", b.AddsTwice),
                Mistake("keep `running` in the order of the keys, not of joining", b.InOrderOfJoining),
                Mistake("at most max_num_seqs run", b.OneTooMany),
                Mistake("admit as many as there are places, in one step", b.OneAStep),
                Mistake("stop at the first that finds no room: passed by small ones, a large one never runs",
                        b.Overtakes),
                Mistake("the smaller key is served first", b.IgnoresKeys),
                Mistake("a row computes all that the request is behind by: behind(name), a prompt too", b.OneToken),
                Mistake("who finds no room must stay in the queue", b.LosesRefused),
            ],
        ),
        Task(
            "09.4", "run", "The step loop", loop.run,
            [
                Case("two requests, one place", loop.loop_args(("a", [3, 1, 4], 3, 5), ("b", [2, 7], 2, 6), seats=1),
                     run=loop.loop_play, why="one after the other: prompt, then token by token"),
                Case("joining and leaving",
                     loop.loop_args(("a", [3, 1, 4], 2, 5), ("b", [2, 7], 6, 6), ("c", [8, 2, 8, 1], 3, 7),
                                 ("d", [1], 1, 8)),
                     run=loop.loop_play, points=2,
                     why="each token is drawn from its request's seed and its position in the request",
                     hint="the position of a token is the number of tokens before it: prompt and output"),
                Case("prompts in pieces",
                     loop.loop_args(("a", [3, 1, 4, 1, 5, 9, 2], 3, 5), ("b", [2, 7], 4, 6), chunk=3),
                     run=loop.loop_play, points=2,
                     why="a row with a piece of a prompt moves the counter and gives no token"),
                Case("one that ends by itself",
                     loop.loop_args(("stops", [6, 5], 9, 3), ("b", [2, 7], 5, 6), ("c", [4, 4], 3, 1)),
                     run=loop.loop_play, points=2,
                     why="token END ends a request, and belongs to its output; its place and blocks are free at once"),
            ],
            rel=0.0, abs=0.0,
            mistakes=[
                Mistake("finish and free exactly once", partial(loop.run_with, twice=True)),
                Mistake("its blocks must be freed when it ends", partial(loop.run_with, no_free=True)),
                Mistake("drawn by the place in the batch: a neighbour changes the text; the position is the number "
                        "of tokens before it", partial(loop.run_with, seat=True)),
                Mistake("each request has its own seed", partial(loop.run_with, one_seed=True)),
                Mistake("off by one: the position of a token is the number of tokens before it",
                        partial(loop.run_with, shift=1)),
                Mistake("off by one: the position of a token is the number of tokens before it",
                        partial(loop.run_with, shift=-1)),
                Mistake("a piece of a prompt gives no token: sample only when nothing is missing",
                        partial(loop.run_with, eager=True)),
                Mistake("token END belongs to the output", partial(loop.run_with, keeps_end=False)),
                Mistake("a token is missing: it ends when it has max_tokens", partial(loop.run_with, short=1)),
            ],
        ),
        Task(
            "09.5", "last_steps", "Steps from lengths", loop.last_steps,
            [
                Case("equal lengths", lambda: (EVEN,), run=loop.both,
                     why="then both ways are the same: nothing to gain"),
                Case("static groups", lambda: (MIXED,), run=loop.static_way, points=2,
                     why="a group begins when the longest of the one before has ended; each ends with its own length"),
                Case("continuous", lambda: (MIXED,), run=loop.continuous_way, points=2,
                     why="the place of an answer that ends in step k computes the next one in step k + 1"),
                Case("one place, or more than requests", lambda: (EDGES,), run=loop.both,
                     why="one place is a queue; places that nobody needs change nothing"),
            ],
            rel=0.0, abs=0.0,
            mistakes=[
                Mistake("the first step is step 1", partial(loop.last_steps_with, first=0)),
                Mistake("an answer ends with its own last token, not with its group",
                        partial(loop.last_steps_with, by_group=True)),
                Mistake("a place stays empty for a step: the next one begins in the very next step",
                        partial(loop.last_steps_with, gap=1)),
                Mistake("in the order of arrival: nobody knows the lengths beforehand",
                        partial(loop.last_steps_with, shortest=True)),
                Mistake("continuous: a free place is taken at once", partial(loop.last_steps_with, only="static")),
                Mistake("static: the next group waits for the longest of this one",
                        partial(loop.last_steps_with, only="continuous")),
            ],
        ),
    ],
    parts=[
        Part("scheduler", "09.3", serving.whole_prompts, {"kv_cache": "paged", "enable_chunked_prefill": False}),
    ],
)  # fmt: skip
