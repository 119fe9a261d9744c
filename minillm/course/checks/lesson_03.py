"""Checks of exercise 03: sampling and text. References in float64 and plain Python, apart from solutions/."""

from __future__ import annotations

import math

import torch

from minillm.course.adapters import sampling, text
from minillm.course.checks import draws
from minillm.course.checks.draws import (
    at,
    batches,
    draw,
    draw_with,
    each_setting,
    min_p,
    nucleus,
    nucleus_with,
    one_row,
    penalties,
    penalties_with,
    tempered,
)
from minillm.course.checks.streams import (
    Detokenizer,
    StopStrings,
    filtered,
    several,
    stops,
    stream,
    stream_long,
    variant,
    whole_text,
)
from minillm.course.checks.tiny import randn
from minillm.course.tasks import Answer, Case, Lesson, Mistake, Part, Task, prediction

BATCH, VOCAB, WEIGHT_BYTES = 64, 128256, 15e9
FIRST = "temperature comes before the filter: it decides which tokens are likely enough to stay"

SKEWED = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1]).log()
HALVES = -math.log(2) * torch.tensor([4.0, 0.0, 6.0, 2.0, 1.0, 7.0, 3.0, 5.0])  # 1/2, 1/4, ... in some order
TIED = torch.tensor([1.0, 3.0, 0.0, 3.0, 3.0, 2.0])
SCORES = torch.tensor([2.0, -1.0, 0.5, -3.0, 4.0, 1.0])


LESSON = Lesson(
    "03",
    "sampling",
    [
        prediction(
            "03.1",
            "Predict what sampling reads, and what a nucleus keeps",
            [
                Answer(
                    "logits_mb", BATCH * VOCAB * 4 / 1e6, "MB",
                    why="one score for each token of the vocabulary, for each sequence of the batch",
                    hint="batch x vocabulary x 4 bytes, divided by 1e6",
                    slips={
                        1 / BATCH: "each sequence of the batch has a row of its own",
                        0.5: "the logits are float32, four bytes each",
                        1e6: "that is in bytes; the key asks for MB (1e6 bytes)",
                    },
                ),
                Answer(
                    "share_percent", 100 * BATCH * VOCAB * 4 / WEIGHT_BYTES, "percent",
                    why="in bytes, one pass over the logits is next to nothing; sorting them takes many passes",
                    hint="bytes of the logits / bytes of the weights x 100",
                    slips={
                        1 / BATCH: "each sequence of the batch has a row of its own",
                        0.5: "the logits are float32, four bytes each",
                        0.01: "that is a fraction; the key asks for percent",
                    },
                ),
                Answer(
                    "kept", 4, "tokens",
                    why="1/2 + 1/4 + 1/8 is 0.875, not yet 0.9: the token that crosses the boundary stays",
                    hint="the smallest k with 1 - 2^-k >= 0.9",
                    slips={3 / 4: "the token that crosses the boundary stays"},
                ),
                Answer(
                    "kept_at_2", 7, "tokens",
                    why="at temperature 2 the probabilities fall by a factor sqrt(2) each: a longer tail",
                    hint="each is 2^-0.5 of the one before: the smallest k with 1 - 2^(-k/2) >= 0.9",
                    slips={
                        4 / 7: FIRST,
                        6 / 7: "the token that crosses the boundary stays",
                        2 / 7: "a temperature above 1 makes the distribution flatter, not steeper",
                    },
                ),
            ],
        ),
        Task(
            "03.2", "tempered", "Softmax at a temperature", tempered,
            [
                Case("temperatures 0.5, 1 and 2", lambda: (randn(1, 6), [(0.5,), (1.0,), (2.0,)]), run=each_setting,
                     why="below 1 the best token gains, above 1 the others do"),
                Case("logits of a thousand, and a banned token",
                     lambda: (torch.tensor([1000.0, 999.0, 998.0, -math.inf]), 1.0),
                     why="exp(1000) is infinite, and inf / inf is NaN",
                     hint="subtract the maximum before exp; no probability changes"),
                Case("float16 at temperature 1e-3", lambda: (torch.tensor([90.0, 89.0, -90.0]).half(), 1e-3),
                     why="90 / 1e-3 is beyond float16; the result is float32"),
                Case("temperature 0", lambda: (torch.tensor([0.5, 2.0, -1.0, 2.0]), 0.0),
                     why="the limit is greedy: all probability on the best token, the lower id among equals",
                     hint="return a vector of zeros with a 1 at the argmax; do not divide by 0"),
            ],
            mistakes=[
                Mistake("divide the logits by the temperature, do not multiply",
                        lambda x, t: tempered(x, 1 / t) if t else draws.naive_softmax(x, t)),
                Mistake("the temperature is missing", lambda x, t: tempered(x, 1.0)),
                Mistake("subtract the maximum before exp: exp(1000) is infinite", draws.naive_softmax),
                Mistake("convert to float32 before dividing", draws.in_input_dtype),
            ],
        ),
        Task(
            "03.3", "nucleus", "Top-k, then top-p", nucleus,
            [
                Case("top_k 2 of 5", lambda: (SKEWED.clone(), 1.0, 2, 1.0), why="the two best share all probability"),
                Case("top_p 0.6", lambda: (SKEWED.clone(), 1.0, 0, 0.6),
                     why="0.4 is not yet 0.6; the token that crosses the boundary stays"),
                Case("top_k 3, then top_p 0.8", lambda: (SKEWED.clone(), 1.0, 3, 0.8),
                     why="of the three best, 0.4 and 0.3 are 0.7 / 0.85 = 0.82: two are enough"),
                Case("temperature 2, top_p 0.9", lambda: (HALVES.clone(), 2.0, 0, 0.9),
                     why="a flatter distribution needs more tokens to reach 0.9: six here, four at temperature 1"),
                Case("three tokens tie", lambda: (TIED.clone(), [(1.0, 2, 1.0), (1.0, 0, 0.5)]), run=each_setting,
                     why="in bf16 ties are common; the lower id wins, or two machines disagree",
                     hint="torch.sort with descending=True, stable=True puts the lower id first; torch.topk need not"),
                Case("filters off, and at their smallest",
                     lambda: (randn(5, 6), [(1.0, 0, 1.0), (1.0, 100, 1.0), (0.7, 0, 1e-6), (0.7, 1, 0.5)]),
                     run=each_setting, why="top_k 0 and top_p 1.0 keep all; the best token always stays"),
            ],
            abs=1e-5,
            mistakes=[
                Mistake("the token that crosses the boundary stays", lambda *a: nucleus_with(*a, boundary=False)),
                Mistake(FIRST, lambda *a: nucleus_with(*a, late=True)),
                Mistake("top-p counts within the k best: renormalise them", lambda *a: nucleus_with(*a, of_k=False)),
                Mistake("among equals the lower id stays", lambda *a: nucleus_with(*a, lower=False)),
                Mistake("what is left must sum to 1 again", lambda *a: nucleus_with(*a, renormalise=False)),
                Mistake("put each probability back at its token id", lambda *a: nucleus_with(*a, by_rank=True)),
                Mistake("the temperature is missing", lambda x, t, k, p: nucleus_with(x, 1.0, k, p)),
            ],
        ),
        Task(
            "03.4", "min_p", "Min-p", min_p,
            [
                Case("a sure model", lambda: (torch.tensor([9.0, 4.0, 1.0, 6.5]), 1.0, 0.05),
                     why="next to a token of 0.9, one of 0.01 is noise"),
                Case("an unsure model", lambda: (torch.tensor([0.0, -0.5, 0.4, 0.1, -4.0] * 6), 1.0, 0.1),
                     why="when the best has 0.05, a token of 0.02 is a fair choice", points=2),
                Case("temperature 3", lambda: (torch.tensor([2.0, -4.0, 0.0, -9.0]), 3.0, 0.06),
                     why="the ratio of two probabilities is exp of the difference of their logits / temperature"),
                Case("min_p 0 and 1", lambda: (torch.tensor([1.0, -3.0, 1.0, -math.inf]), [(1.0, 0.0), (1.0, 1.0)]),
                     run=each_setting, why="0 keeps all, 1 keeps the best token and its equals",
                     hint="log(0) is -inf, but math.log(0) raises; compare probabilities, or keep all at 0"),
            ],
            mistakes=[
                Mistake("a token exactly at the threshold stays", draws.strictly_above),
                Mistake("the threshold is a share of the best token's probability, not a probability",
                        draws.absolute_threshold),
                Mistake("compare probabilities, not logits: a logit has no natural zero", draws.of_the_logit),
                Mistake(FIRST, lambda x, t, m: min_p(x, 1.0, m)),
                Mistake("a dropped token has the logit -inf; 0 is a logit like any other",
                        lambda *a: min_p(*a).masked_fill(min_p(*a) == -math.inf, 0.0)),
            ],
        ),
        Task(
            "03.5", "penalties", "Penalties", penalties,
            [
                Case("repetition 2, positive and negative logits", lambda: (SCORES.clone(), [0], [1, 4], 2.0, 0.0, 0.0),
                     points=2, why="both must become less likely: 4 to 2, and -1 to -2"),
                Case("repetition 2, a token seen three times", lambda: (SCORES.clone(), [3, 0], [0, 0], 2.0, 0.0, 0.0),
                     why="repetition asks whether, not how often"),
                Case("presence 0.5", lambda: (SCORES.clone(), [2, 2], [0, 0, 3], 1.0, 0.5, 0.0),
                     why="once for each token generated; the prompt does not count"),
                Case("frequency 0.5", lambda: (SCORES.clone(), [2, 0], [0, 0, 3], 1.0, 0.0, 0.5),
                     why="once for each time the token was generated; the prompt does not count"),
                Case("all three", lambda: (SCORES.clone(), [1, 5], [5, 4, 5], 1.5, 0.25, 0.5),
                     why="repetition first, on the model's own logits; then the other two are subtracted"),
            ],
            mistakes=[
                Mistake("dividing moves a negative logit up: multiply it", lambda *a: penalties_with(*a, divide=True)),
                Mistake("repetition sees the prompt too", lambda *a: penalties_with(*a, see=("output",))),
                Mistake("repetition applies once, however often a token comes",
                        lambda *a: penalties_with(*a, each=True)),
                Mistake("presence and frequency count generated tokens only",
                        lambda *a: penalties_with(*a, count=("prompt", "output"))),
                Mistake("presence is once a token, frequency once an occurrence",
                        lambda x, p, o, r, pre, fre: penalties_with(x, p, o, r, fre, pre)),
                Mistake("frequency counts every occurrence",
                        lambda x, p, o, r, pre, fre: penalties_with(x, p, o, r, pre + fre, 0.0)),
                Mistake("presence and frequency are subtracted", lambda *a: penalties_with(*a, sign=1)),
                Mistake("repetition comes first, on the model's logits", lambda *a: penalties_with(*a, first=False)),
            ],
        ),
        Task(
            "03.6", "draw", "A draw keyed by seed and position", draw,
            [
                Case("one sequence, 12 steps", lambda: (torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15]), 7, 12), run=one_row,
                     why="each position has a random number of its own"),
                Case("the same rows in other batches",
                     lambda: (randn(6, 8, 12).softmax(-1), [5, 5, 9, 0, 3, 9, 5, 1], [0, 1, 4, 9, 9, 5, 2, 30]),
                     run=batches, points=2, why="a request must not change because another joins or leaves the batch"),
                Case("on a boundary, and beside tokens of probability 0",
                     lambda: ([[0.25, 0.25, 0.5, 0.0], [0.0, 0.5, 0.0, 0.5], [0.0, 0.5, 0.0, 0.5]], [0.25, 0.0, 0.5]),
                     run=at, why="token i owns the numbers from the sum before it up to, not including, its own sum",
                     hint="the first token whose running sum is greater than u, not greater or equal"),
                Case("a sum just below 1", lambda: ([[0.7, 0.2, 0.1, 0.0]] * 2, [1 - 2**-53, 0.95]), run=at,
                     why="in floating point the sum may end below u",
                     hint="when no running sum exceeds u, take the last token whose probability is not 0"),
            ],
            mistakes=[
                Mistake("the position is missing from the key: every step draws with the same number",
                        lambda *a: draw_with(*a, key=lambda s, p, r: (s, 0))),
                Mistake("the row is no part of the key: it changes with the batch",
                        lambda *a: draw_with(*a, key=lambda s, p, r: (s, r))),
                Mistake("the row is no part of the key: it changes with the batch",
                        lambda *a: draw_with(*a, key=lambda s, p, r: (s + r, p))),
                Mistake("the seed is missing from the key", lambda *a: draw_with(*a, key=lambda s, p, r: (0, p))),
                Mistake("the order is uniform(seed, position)", lambda *a: draw_with(*a, key=lambda s, p, r: (p, s))),
                Mistake("that is the best token, not a draw", lambda p, s, t, u: p.argmax(-1).tolist()),
                Mistake("take the first running sum greater than u: at u = 0 a token of probability 0 came out",
                        lambda *a: draw_with(*a, zeros=True)),
                Mistake("the sum ended below u; the last token with a probability takes what is left",
                        lambda *a: draw_with(*a, overrun=True)),
            ],
        ),
        Task(
            "03.7", "Detokenizer", "The incremental detokenizer", Detokenizer,
            [
                Case("words, and a character in three tokens",
                     lambda: ([b"The", b" caf", b"\xc3", b"\xa9", b" is ", b"\xe4", b"\xbd", b"\xa0", b"!"],),
                     run=stream, points=2, why="a character is shown once its last byte is there"),
                Case("a token that ends one character and begins the next",
                     lambda: ([b"a\xf0\x9f", b"\x98\x80b\xe5", b"\xa5\xbd", b"c"],),
                     run=stream, why="all but the unfinished character is final and must not wait",
                     hint="hold back one U+FFFD at the end of the text, nothing before it"),
                Case("the stream ends inside a character", lambda: ([b"ok", b" \xf0\x9f", b"\x98"],), run=stream,
                     why="finish() releases what is held, as decode shows it"),
                Case("bytes that are no text", lambda: ([b"a\xff", b"b", b"\x80", b"\x80", b"c"],), run=stream,
                     why="once another character follows, U+FFFD is part of the text, as in decode"),
                Case("600 tokens", lambda: ([b"long ", b"\xe6", b"\xb0\xb4", b" and \xf0", b"\x9f\x8c\x8a", b" "], 100),
                     run=stream_long, why="the cost of a token must not grow with the text"),
            ],
            mistakes=[
                Mistake("U+FFFD reached the reader: a token alone may be half a character", variant(alone=True)),
                Mistake("U+FFFD reached the reader: hold it back while it ends the text", variant(hold="none")),
                Mistake("hold back one U+FFFD at the end, not the text before it", variant(hold="all")),
                Mistake("held text is lost: finish() must release it", variant(lose=True)),
                Mistake("U+FFFD that stays is part of the text; hold it, do not delete it", variant(strip=True)),
            ],
        ),
        Task(
            "03.8", "StopStrings", "Stop strings across tokens", StopStrings,
            [
                Case("a stop in three pieces",
                     lambda: (["Hi", " there\n", "\nUs", "er: what", " more"], ["\n\nUser:"], False),
                     run=filtered, points=2, why="no part of the stop may be shown, and nothing after it"),
                Case("beginnings that come to nothing",
                     lambda: ([(["a<", "b", " <s", "<sto", "x", "p>"], ["<stop>"]), (["a", "a", "a", "b"], ["aab"])],),
                     run=several, why="held text is released as soon as it cannot be the beginning of a stop",
                     hint="keep the longest end of the text that begins a stop string; release what stands before it"),
                Case("several stops",
                     lambda: ([(["abcd"], ["abcd", "bc"]), (["a", "bc"], ["bc", "abc"]), (["1", "234"], ["4", "23"])],),
                     run=several, why="the stop completed first wins; of two completed at once, the longer"),
                Case("include_stop", lambda: (["one", " tw", "o three"], ["two"]), run=whole_text,
                     why="the text ends with the stop string, not with the piece that brought it"),
                Case("the end of the stream", lambda: ([(["so <en"], ["<end>"]), (["x", "y<end", ">z"], ["<end>"])],),
                     run=several, why="without a stop, held text belongs to the reader; after one, nothing does"),
            ],
            mistakes=[
                Mistake("part of the stop reached the reader: hold back what may be its beginning", stops(leak=True)),
                Mistake("a stop string may span pieces: search held and new text together", stops(piecewise=True)),
                Mistake("hold back only what may be the beginning of a stop", stops(greedy_hold=True), 0.5),
                Mistake("when a beginning fails, its end may begin the stop again", stops(flush=True)),
                Mistake("the stop that is completed first wins, not the one that begins first", stops(choose="start")),
                Mistake("the stop that is completed first wins, not the first of the list", stops(choose="list")),
                Mistake("of two stops completed by one character the longer wins", stops(choose="short")),
                Mistake("held text is lost: finish() must release it", stops(lose=True)),
                Mistake("with include_stop the stop string is part of the text",
                        lambda stop, include: StopStrings(stop, False)),
            ],
        ),
    ],
    parts=[
        Part("sampler", "03.6", sampling.sampler, uses=sampling.FILTERS),
        Part("detokenizer", "03.7", text.detokenizer),
        Part("stops", "03.8", text.stops),
    ],
)  # fmt: skip
