"""Checks of exercise 10: chunked prefill. References and mistakes are in chunks.py."""

from __future__ import annotations

from functools import partial

from minillm.course.adapters import serving
from minillm.course.checks import chunks
from minillm.course.checks.chunks import (
    asked,
    batch_with,
    batches,
    choose_with,
    chosen,
    chunked_play,
    plan_with,
    plans,
    schedules,
    whole_run,
)
from minillm.course.tasks import Answer, Case, Lesson, Mistake, Part, Task, prediction

# 10.1 the prediction: 16 streams, a prompt of 4,000 tokens; a step takes 20 ms and 0.1 ms more for each prompt token;
# a budget of 256 tokens a step, of which 240 are left for the prompt.
STREAMS, PROMPT, STEP, TOKEN, BUDGET = 16, 4000, 20.0, 0.1, 256
CHUNK = BUDGET - STREAMS
STEPS = -(-PROMPT // CHUNK)
WHOLE = STEP + TOKEN * PROMPT  # the step of the prompt, alone
FIRST = STEPS * STEP + TOKEN * PROMPT

MIXED = [
    ([([5, 2, 9], 8, 3, 7), ([4], 3, 1, 1), ([7, 1, 3], 9, 1, 1)], 4),
    ([([2, 6, 1], 0, 5, 5), ([8, 3], 5, 1, 1)], 4),
    ([([3, 1], 1, 2, 2), ([5, 4, 2], 4, 2, 4)], 2),
]  # fmt: skip
LONG = [("add", "a", 1.0, 2), ("steps", 1), ("add", "b", 2.0, 3), ("steps", 1), ("add", "long", 3.0, 20)]

LESSON = Lesson(
    "10",
    "chunked_prefill",
    [
        prediction(
            "10.1",
            "Predict the freeze, and the price of the cure",
            [
                Answer("gap_whole", WHOLE + STEP, "ms", rel=0.0005,
                       why="the whole prompt has a step of its own; a stream's next token comes out of the step after",
                       hint="between two tokens of a stream lie the prompt's step and a decode step",
                       slips={WHOLE / (WHOLE + STEP): "the stream's own step comes behind the prompt's: add it"}),
                Answer("gap_chunked", STEP + TOKEN * CHUNK, "ms", rel=0.0005,
                       why="a step of 16 decode tokens and 240 prompt tokens",
                       hint="streams take their tokens out of the budget, and a mixed step serves them as well",
                       slips={(STEP + TOKEN * BUDGET) / (STEP + TOKEN * CHUNK):
                              "16 of the 256 tokens are the streams'",
                              (2 * STEP + TOKEN * CHUNK) / (STEP + TOKEN * CHUNK):
                              "a mixed step gives every stream a token: no other step lies between"}),
                Answer("steps", STEPS, "steps", rel=0.0,
                       why="4,000 tokens in chunks of 240, the last one smaller",
                       hint="each step takes the streams' 16 tokens first",
                       slips={16 / 17: "16 of the 256 tokens are the streams': chunks have 240"}),
                Answer("first_token_whole", WHOLE, "ms", rel=0.0005,
                       why="the prompt's only step", hint="20 ms, and 0.1 ms for each prompt token"),
                Answer("first_token_chunked", FIRST, "ms", rel=0.0005,
                       why="each chunk pays for a step: the weights are read once a chunk",
                       hint="the tokens cost the same as before; the 20 ms come once a step",
                       slips={WHOLE / FIRST: "that is in one step; here the 20 ms are paid in each of them",
                              (16 * STEP + TOKEN * PROMPT) / FIRST: "chunks have 240 tokens: 17 steps"}),
                Answer("largest_budget", STREAMS + 300, "tokens", rel=0.0,
                       why="50 ms leave 30 ms for prompt tokens, 300 of them, beside 16 decode tokens",
                       hint="the budget counts the streams' tokens, too",
                       slips={300 / 316: "that is the chunk; the budget also has the streams' 16 tokens",
                              500 / 316: "the step itself takes 20 ms of the 50"}),
            ],
        ),
        Task(
            "10.2", "plan_step", "Share the budget", chunks.plan_step,
            [
                Case("everybody fits",
                     lambda: ([([1, 1, 5], 10), ([3], 3), ([], 4), ([1], 1), ([2, 2, 1], 5)],), run=plans,
                     why="nobody gets more than it is behind by"),
                Case("streams and one prompt",
                     lambda: ([([1, 1, 1, 40], 16), ([1, 90, 1], 8), ([500, 1, 1, 1], 64)],), run=plans, points=2,
                     why="a stream gets its token in every step, wherever it stands in the order"),
                Case("two prompts",
                     lambda: ([([30, 20, 1], 16), ([6, 20, 1], 16), ([6, 4, 9, 1, 1], 12)],), run=plans, points=2,
                     why="what the streams leave goes to the prompts in order, the first one first"),
                Case("a budget that is too small",
                     lambda: ([([9, 1, 1, 1], 2), ([1, 1, 1], 1), ([7, 7], 1), ([1, 8], 1)],), run=plans, points=2,
                     why="the budget is a promise: no step has more tokens, and whoever is first comes first"),
                Case("to the end", lambda: ([1, 33, 1, 12], 11), run=whole_run,
                     why="the counter alone tells what a request is: a prompt with one token left is a stream"),
            ],
            rel=0.0, abs=0.0,
            mistakes=[
                Mistake("a frozen stream: prompts took the budget first", partial(plan_with, kind="prompts first")),
                Mistake("nothing was set aside: a prompt that comes earlier in the order must leave a token for each "
                        "stream behind it", partial(plan_with, kind="in order")),
                Mistake("the streams' tokens are computed in the same step: they count", partial(plan_with,
                                                                                                kind="streams free")),
                Mistake("a prompt need not fit: it takes what is left, and the rest in later steps",
                        partial(plan_with, kind="whole")),
                Mistake("what one prompt takes, the next one has not", partial(plan_with, kind="budget each")),
                Mistake("one after the other: the first prompt is done soonest, and nobody is later",
                        partial(plan_with, kind="equal")),
                Mistake("when a prompt leaves something, the next one takes it", partial(plan_with, kind="one prompt")),
                Mistake("the order is given: it is the policy's", partial(plan_with, kind="shortest first")),
                Mistake("at most what a request is behind by", partial(plan_with, kind="fills")),
            ],
        ),
        Task(
            "10.3", "flat_batch", "One batch of everything", chunks.flat_batch,
            [
                Case("positions", lambda: (MIXED, "positions"), run=batches, points=2,
                     why="the rotation of a key is that of its place in the text, whichever step computes it"),
                Case("slots", lambda: (MIXED, "slots"), run=batches, why="a new token is written behind the old ones"),
                Case("reads", lambda: (MIXED, "reads"), run=batches, points=2,
                     why="a token sees all of its own sequence up to itself: history, then the chunk so far"),
                Case("logits", lambda: (MIXED, "logits"), run=batches, points=2,
                     why="only a request that is complete after this step has a next token"),
            ],
            rel=0.0, abs=0.0,
            mistakes=[
                Mistake("chunk two begins where chunk one ended: positions do not start at 0 again",
                        partial(batch_with, reset=True)),
                Mistake("position `start` is the first that is new: `start` tokens have 0 to start - 1",
                        partial(batch_with, off_by_one=True)),
                Mistake("that overwrites the beginning of the sequence: the new tokens lie behind it",
                        partial(batch_with, writes_reset=True)),
                Mistake("through the table: the block's id, not its number in the sequence",
                        partial(batch_with, logical=True)),
                Mistake("the mask has an offset: the i-th new token sees start + i + 1 tokens",
                        partial(batch_with, reads="no offset")),
                Mistake("the history is missing: a chunk reads what earlier chunks have written",
                        partial(batch_with, reads="chunk only")),
                Mistake("a token sees later ones of its chunk: the mask is causal within it",
                        partial(batch_with, reads="future")),
                Mistake("a token sees itself", partial(batch_with, reads="not itself")),
                Mistake("a token would be drawn in the middle of a prompt: an unfinished chunk has no next token",
                        partial(batch_with, last="every row")),
                Mistake("logits are counted in the flat batch, not in each row",
                        partial(batch_with, last="in its row")),
            ],
        ),
        Task(
            "10.4", "ChunkedScheduler", "A scheduler with a budget", chunks.ChunkedScheduler,
            [
                Case("a long prompt beside two streams", lambda: (4, 8, [*LONG, ("steps", 5)]), run=chunked_play,
                     points=2, why="two tokens of eight are the streams', six go to the prompt, and nobody freezes"),
                Case("what is left admits",
                     lambda: (4, 8, [("add", "a", 1.0, 3), ("add", "b", 2.0, 4), ("add", "c", 3.0, 9), ("steps", 2),
                                     ("add", "d", 0.0, 2), ("steps", 2), ("finish", "a"), ("steps", 2)]),
                     run=chunked_play, points=2,
                     why="those who run come first; with what is left, waiting ones join in the order of their keys"),
                Case("an urgent long prompt",
                     lambda: (4, 6, [("add", "a", 5.0, 2), ("add", "b", 6.0, 2), ("steps", 2), ("add", "c", 1.0, 20),
                                     ("steps", 5)]),
                     run=chunked_play, points=2,
                     why="it is first in the order, and the streams behind it still get their tokens"),
                Case("places and memory",
                     lambda: (2, 6, [("add", n, k, t, b) for n, k, t, b in
                                     (("a", 2.0, 2, 2), ("b", 1.0, 2, 3), ("c", 3.0, 2, 1), ("d", 4.0, 2, 4),
                                      ("e", 5.0, 1, 1))]
                              + [("steps", 2), ("finish", "a"), ("steps", 1), ("finish", "c"), ("steps", 1),
                                 ("finish", "b"), ("steps", 2)], 6),
                     run=chunked_play, points=2,
                     why="at most max_num_seqs run, and the first in the queue waits until there is room for it"),
                Case("a budget of one",
                     lambda: (3, 1, [("add", "a", 1.0, 1), ("steps", 1), ("add", "b", 2.0, 3), ("steps", 2),
                                     ("finish", "a"), ("steps", 4)]),
                     run=chunked_play, why="a stream takes all there is, and the prompt waits for its end"),
                Case("random schedules", lambda: (range(9, 19), True), run=schedules, points=2,
                     why="mounted in an engine whose memory knows what every slot holds"),
                Case("random schedules, little memory", lambda: (range(17, 27), False), run=schedules, points=2,
                     why="a request that finds no room waits, and loses nothing"),
            ],
            rel=0.0, abs=0.0,
            mistakes=[
                Mistake("nothing was set aside: a prompt that comes earlier in the order must leave a token for each "
                        "stream behind it", chunks.NothingSetAside),
                Mistake("a frozen stream: prompts took the budget first", chunks.PromptsFirst),
                Mistake("the streams' tokens are computed in the same step: they count", chunks.StreamsAreFree),
                Mistake("a prompt need not fit: it takes what is left, and the rest in later steps", chunks.NoChunks),
                Mistake("those who run come before those who wait", chunks.AdmitsFirst),
                Mistake("a newcomer's first chunk is what is left of the budget, not all of its prompt",
                        chunks.WholeNewcomers),
                Mistake("as long as something is left, the next one may join", chunks.OneNewcomer),
                Mistake("a prompt under way does not close the door: only the budget does", chunks.WaitsForQuiet),
                Mistake("at most max_num_seqs run at once", chunks.ForgetsSeats),
                Mistake("who joins holds blocks: with nothing left of the budget, nobody should",
                        chunks.AdmitsWithNothing),
            ],
        ),
        Task(
            "10.5", "choose_budget", "A budget for a promise", chunks.choose_budget,
            [
                Case("two promises", lambda: ([(20.0, 0.0, 0.125, 16, 50.0, 8192), (8.0, 0.25, 0.5, 4, 20.0, 512),
                                               (1.0, 0.0, 0.015625, 8, 2.0, 2048)],), run=chosen, points=2,
                     why="the largest budget whose step keeps the promise: a larger one breaks it, a smaller one costs "
                         "the prompt more steps"),
                Case("all or nothing", lambda: ([(20.0, 0.0, 0.125, 16, 900.0, 512), (20.0, 0.0, 0.125, 16, 20.0, 512),
                                                 (20.0, 0.5, 0.125, 16, 5.0, 4096)],), run=chosen, points=2,
                     why="never more than `most`; and one prompt token a step at least, or no prompt ever ends"),
                Case("in few calls", lambda: (8192,), run=asked,
                     why="a cost function may be a measurement: each call has its price"),
            ],
            rel=0.0, abs=0.0,
            mistakes=[
                Mistake("a step of exactly the target keeps the promise", partial(choose_with, kind="strict")),
                Mistake("the budget holds the streams' tokens, too: the chunk is what they leave",
                        partial(choose_with, kind="streams beside")),
                Mistake("streams are in the step, too", partial(choose_with, kind="no streams")),
                Mistake("that is the chunk; the budget counts the streams' tokens as well",
                        partial(choose_with, kind="chunk")),
                Mistake("that is the smallest budget that breaks the promise", partial(choose_with, kind="one more")),
                Mistake("with no room for a prompt token, no prompt ever ends: at least streams + 1",
                        partial(choose_with, kind="no floor")),
                Mistake("any whole number will do, not only powers of two", partial(choose_with, kind="power of two")),
            ],
        ),
    ],
    parts=[
        Part("scheduler", "10.4", serving.chunked, {"kv_cache": "paged", "enable_chunked_prefill": True}),
    ],
)  # fmt: skip
