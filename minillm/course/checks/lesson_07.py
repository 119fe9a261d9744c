"""Checks of exercise 07: launch overhead. References and mistakes are in launches.py and graphs.py."""

from __future__ import annotations

from functools import partial

from minillm.course.checks.graphs import (
    IN_PLACE,
    LONG,
    SHORT,
    ComputesAtSet,
    GetsNoCopy,
    Graph,
    MovesInputs,
    MovesResults,
    NeverReplays,
    ReplaysOldValues,
    ReplaysTheLastCall,
    TakesAnyShape,
    TakesAnyType,
    buffers_args,
    fill,
    fill_with,
    filled,
    graph_args,
    play,
)
from minillm.course.checks.launches import (
    bucket_plan,
    bucket_with,
    count_calls,
    count_with,
    gain_with,
    gains,
    graph_gain,
    plans,
    step_args,
)
from minillm.course.checks.tiny import randn
from minillm.course.tasks import Answer, Case, Lesson, Mistake, Task, prediction

# 07.1 the prediction: 28 layers of 11 kernels and 4 more; 6 us a launch; 0.75e9 parameters in bf16 at 3 TB/s; every
# stream reads 0.1 GB of keys and values.
LAUNCHES = 28 * 11 + 4
HOST = LAUNCHES * 6e-6
WEIGHTS = 0.75e9 * 2 / 3e12
STREAMS = 42  # the smallest whole number with (1.5 GB + n 0.1 GB) / 3 TB/s >= HOST

SMALL = [1, 2, 4, 8]
NEW = (randn(11, 4, 4), randn(12, 4, 4))

LESSON = Lesson(
    "07",
    "launch_overhead",
    [
        prediction(
            "07.1",
            "Predict host and device",
            [
                Answer(
                    "launches", LAUNCHES, "launches", rel=0.001, why="every layer launches its own kernels",
                    hint="layers x kernels of a layer, and those outside the layers",
                    slips={28 * 11 / LAUNCHES: "the kernels outside the layers are launched too",
                           11 / LAUNCHES: "that is one layer; every layer launches its own"},
                ),
                Answer(
                    "host_ms", HOST * 1e3, "ms", why="the host starts one kernel after the other",
                    hint="launches x microseconds, divided by 1000",
                    slips={1e3: "that is in microseconds; the key asks for milliseconds",
                           1e-3: "that is in seconds; the key asks for milliseconds"},
                ),
                Answer(
                    "device_ms", WEIGHTS * 1e3, "ms", why="at one stream a step is nothing but reading the weights",
                    hint="parameters x bytes / bandwidth",
                    slips={0.5: "bf16 is two bytes a parameter",
                           1e-3: "that is in seconds; the key asks for milliseconds"},
                ),
                Answer(
                    "eager_ms", max(HOST, WEIGHTS) * 1e3, "ms",
                    why="host and device work at the same time",
                    hint="the longer of the two: the device works while the host launches the next kernel",
                    slips={(HOST + WEIGHTS) / HOST: "that is the sum; host and device work at the same time",
                           WEIGHTS / HOST: "that is the shorter of the two; somebody waits for the other"},
                ),
                Answer(
                    "streams", STREAMS, "streams", rel=0.001,
                    why="launches do not grow with the batch, the bytes of keys and values do",
                    hint="the smallest n with (weights + n x bytes of a stream) / bandwidth >= host time, rounded up",
                    slips={41 / 42: "with 41 streams the device is still a little faster than the host: round up",
                           57 / 42: "the weights are read as well: take their bytes off first"},
                ),
            ],
        ),
        Task(
            "07.2", "count_calls", "Count what the dispatcher sees", count_calls,
            [
                Case("one norm", step_args("norm"), why="a norm of one row is five calls, whatever the row holds"),
                Case("views run nothing", step_args("turn", "norm", "turn"),
                     why="a transpose describes the same memory anew: no kernel runs"),
                Case("an operator that works in place", step_args("shift", "shift"),
                     why="writing into its argument is work like any other"),
                Case("a small model", step_args("norm", "mlp", "norm", "mlp", "turn", "shift", "mlp"), points=2,
                     why="every call counts, every time"),
            ],
            mistakes=[
                Mistake("views are in the count: leave out where func.is_view", partial(count_with, views=True)),
                Mistake("operators that write in place (their name ends in _) run a kernel too",
                        partial(count_with, in_place=False)),
                Mistake("each operator stands there once; count every call of it", partial(count_with, once=True)),
                Mistake("nothing was counted: the mode must be active while the step runs (with mode: ...)",
                        lambda x, w, program: {}),
            ],
            limit_s=30,  # a dispatch mode's first call imports nine hundred modules of torch, sympy among them
        ),
        Task(
            "07.3", "bucket_plan", "Buckets and their price", bucket_plan,
            [
                Case("sizes between the buckets", lambda: ([3, 5, 1, 7], list(SMALL)),
                     why="a graph serves every batch up to its own size"),
                Case("sizes on the buckets", lambda: ([1, 2, 4, 8, 4], list(SMALL)),
                     why="a full bucket has no padding"),
                Case("a batch that no graph holds", lambda: ([8, 9, 3, 30], list(SMALL)), points=2,
                     why="what is larger than the largest graph runs eagerly, as it is"),
                Case("several servers",
                     lambda: ([([3], [4]), ([9], [4, 8]), ([2, 2, 2, 17], [1, 16, 32]), ([5, 6, 8], [8]), ([], [1])],),
                     points=2, run=plans, why="the share is of all rows that graphs compute, and 0 where none runs"),
            ],
            mistakes=[
                Mistake("a batch as large as the bucket fits into it (>=, not >)", partial(bucket_with, strict=True)),
                Mistake("that bucket is smaller than the batch; round up", partial(bucket_with, down=True)),
                Mistake("always the largest bucket works, and wastes most; take the smallest that fits",
                        partial(bucket_with, largest=True)),
                Mistake("that is padding over real rows; the share is padding over all rows that graphs compute",
                        partial(bucket_with, of_real=True)),
                Mistake("a batch larger than every bucket has None: a graph cannot grow",
                        partial(bucket_with, clamp=True)),
                Mistake("that is the mean of each step's share; steps with more rows weigh more: sum the rows first",
                        partial(bucket_with, mean=True)),
            ],
            abs=1e-9,
        ),
        Task(
            "07.4", "fill", "Fixed buffers and padding rows", fill,
            [
                Case("a full batch", buffers_args(2, 3, 4, [(11, 5, [4, 2]), (12, 0, [3])]), run=filled,
                     why="positions count from 0, so a context of the new token included is position + 1"),
                Case("two rows of four", buffers_args(4, 3, 4, [(11, 9, [5, 1, 2]), (12, 3, [3])]), points=2,
                     run=filled,
                     why="a padding row writes nothing, reads nothing and finds nobody's block"),
                Case("the batch shrinks and grows",
                     buffers_args(3, 3, 4, [(11, 9, [5, 1, 2]), (12, 3, [3]), (13, 6, [4, 6])],
                                  [(14, 10, [5, 1, 2])], [(15, 4, [7, 8]), (16, 0, [9])]),
                     points=3, run=filled,
                     why="the buffers still hold the step before; whoever left must leave no trace"),
                Case("nobody", buffers_args(2, 2, 4, []), run=filled, why="an empty batch is all padding"),
            ],
            writes=True,
            mistakes=[
                Mistake("rows beyond the batch keep the step before: somebody's slot is overwritten again and again",
                        partial(fill_with, padded=False)),
                Mistake("a padding row must not write: its slot is -1, not 0", partial(fill_with, slot=0)),
                Mistake("the context counts the new token: position + 1", partial(fill_with, context=0)),
                Mistake("behind the last block of a row stands what an earlier step left: put 0 there",
                        partial(fill_with, tails=False)),
                Mistake("a slot is block * block_size + offset, with the block from the row's table",
                        partial(fill_with, by_position=True)),
                Mistake("a padding row has context 0: it reads nothing", partial(fill_with, pad_context=1)),
                Mistake("the buffers themselves must change: assign into them (buffer[i] = ...)",
                        lambda *args: None),
            ],
        ),
        Task(
            "07.5", "Graph", "Record once, replay", Graph,
            [
                Case("new values in the buffers",
                     graph_args(SHORT, ("get", "y"), ("set", "x", NEW[0]), ("replay",), ("get", "y"), ("get", "h"),
                                ("set", "w", NEW[1]), ("replay",), ("get", "y"), ("get", "x")),
                     points=2, run=play, why="a replay reads what lies at the recorded addresses now"),
                Case("addresses stay where they are",
                     graph_args(LONG, ("address", "x"), ("address", "h"), ("address", "out"), ("set", "x", NEW[0]),
                                ("address", "x"), ("replay",), ("address", "h"), ("address", "out"), ("replay",),
                                ("address", "out"), ("get", "out")),
                     points=2, run=play, why="whoever reads the result knows one address, and the recorded calls too"),
                Case("another shape or type is refused",
                     graph_args(SHORT, ("refused", "x", randn(13, 1, 4)), ("refused", "x", randn(13, 8, 4)),
                                ("refused", "x", randn(13, 4, 4).double()), ("refused", "x", NEW[0]), ("replay",),
                                ("get", "y")),
                     points=2, run=play, why="a graph of another shape is another graph"),
                Case("nothing happens before the replay",
                     graph_args(LONG, ("set", "x", NEW[0]), ("set", "scale", NEW[1]), ("get", "out"), ("replay",),
                                ("get", "out")),
                     run=play, why="filling a buffer is not running the step"),
                Case("a call that writes into its input", graph_args(IN_PLACE, ("get", "y"), ("around", "y")),
                     run=play, why="what the caller handed in, and what `get` handed out, are the caller's: copy both"),
            ],
            mistakes=[
                Mistake("`set` made a new tensor; the recorded calls go on reading the old one: copy into it (copy_)",
                        ReplaysOldValues),
                Mistake("a replay must write where the first run wrote: copy_ into the recorded result", MovesResults),
                Mistake("the input moved: copy the value into the tensor that is there", MovesInputs),
                Mistake("another shape was taken (copy_ repeats a row if it can): raise ValueError", TakesAnyShape),
                Mistake("another dtype was taken (copy_ converts): raise ValueError", TakesAnyType),
                Mistake("`set` only fills the buffer; the calls run in `replay`", ComputesAtSet),
                Mistake("`get` gave the buffer itself: what was handed out changes with the next replay; return a copy",
                        GetsNoCopy),
                Mistake("a replay runs all recorded calls again", NeverReplays),
                Mistake("a replay runs all recorded calls, in order, and not only the last", ReplaysTheLastCall),
            ],
        ),
        Task(
            "07.6", "graph_gain", "When a graph pays", graph_gain,
            [
                Case("a step that waits for its host", lambda: (300, 5e-6, 4e-4, 1e-5, 1e-6, 0.5), points=2,
                     why="eager, the longer of host and device counts"),
                Case("a step that is long on the device", lambda: (300, 5e-6, 9e-3, 1e-5, 1e-6, 0.5),
                     why="the host was ahead anyway; the gaps remain, and the gain is negative"),
                Case("a sweep",
                     lambda: ([(n, c, d, 2e-5, gap, 0.25) for n, c, d, gap in
                               ((100, 1e-5, 1e-4, 0.0), (100, 1e-5, 1.05e-3, 0.0), (1, 8e-6, 1e-6, 1e-6),
                                (970, 4e-6, 6e-5, 1e-6), (320, 4e-6, 3.4e-3, 1e-6), (640, 6e-6, 2e-3, 5e-7))],),
                     points=3, run=gains, why="small models and small batches gain, large ones lose"),
            ],
            mistakes=[
                Mistake("host and device work at the same time: an eager step takes the longer, not the sum",
                        partial(gain_with, summed=True)),
                Mistake("kernels follow each other with a gap: one less than there are kernels",
                        partial(gain_with, gaps="none")),
                Mistake("between n kernels there are n - 1 gaps", partial(gain_with, gaps="each")),
                Mistake("after the rounded-down number of steps the capture is not paid yet: round up",
                        partial(gain_with, floor=True)),
                Mistake("a graph that saves nothing never pays its capture: None", partial(gain_with, always=True)),
                Mistake("an eager step is never shorter than its device time", partial(gain_with, host_only=True)),
            ],
            rel=1e-6, abs=1e-12,
        ),
    ],
)  # fmt: skip
