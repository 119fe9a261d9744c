"""The prediction of exercise 14: what two cards hold, what they say to each other, and how slow a link may be."""

from __future__ import annotations

from minillm.course.tasks import Answer, prediction

# 70e9 parameters of 2 bytes, 80 layers, D = 8192, 64 heads and 8 KV heads of 128; memory
# of 2 TB/s; links of 400 GB/s on which each collective takes 10 us more.
WEIGHTS, CALLS, EACH = 140e9, 2 * 80, 8192 * 2
ALONE_MS, HALF_MS = 1e3 * WEIGHTS / 2e12, 1e3 * WEIGHTS / 2 / 2e12
SAID_MS = 1e3 * CALLS * (10e-6 + EACH / 400e9)
TOKEN_MS = HALF_MS + SAID_MS
EVEN_US = 1e3 * (ALONE_MS - HALF_MS) / CALLS - 1e6 * EACH / 400e9
KV = 2 * 80 * 1 * 128 * 2

PREDICTION = prediction(
    "14.1",
    "Predict two cards",
    [
        Answer("rank_gb", 70, "GB", rel=0.005,
               why="each matrix is cut, none is held twice", hint="70e9 parameters of 2 bytes, over two ranks",
               slips={2.0: "that is the whole model; each rank holds half",
                      0.5: "two bytes a parameter: 140 GB over two ranks",
                      1e9 / 2**30: "that is in GiB (2^30 bytes); the key asks for GB (10^9)"}),
        Answer("reduced_mb", CALLS * EACH / 1e6, "MB", rel=0.01,  # the embedding may be counted or not
               why="two all-reduces a layer, each of one row of D numbers",
               hint="2 x 80 x 8192 x 2 bytes",
               slips={0.5: "two a layer: one after attention, one after the MLP; and two bytes a number",
                      1 / 80: "that is one layer; there are 80",
                      2.0: "each tensor once: the key asks for their size, not for what both ranks send",
                      1e6 / 2**20: "that is in MiB (2^20 bytes); the key asks for MB (10^6)"}),
        Answer("token_ms", TOKEN_MS, "ms", rel=0.002,
               why="half of the weights are read, and 160 times the ranks wait for each other",
               hint="70e9 / 2e12 s, and 160 x (10 us + 2 (N - 1) / N x 16,384 bytes / 400e9)",
               slips={HALF_MS / TOKEN_MS: "that is the memory alone; each of the 160 all-reduces is waited for",
                      (ALONE_MS + SAID_MS) / TOKEN_MS: "each rank reads only its half of the weights",
                      (HALF_MS + SAID_MS / 2) / TOKEN_MS: "two all-reduces a layer, not one",
                      1e-3: "in ms"}),
        Answer("break_even_us", EVEN_US, "µs", rel=0.01,
               why="what the second card saves, shared out over all the times the ranks wait",
               hint="(70 ms - 35 ms) / 160, less the time of the bytes",
               slips={2.0: "two all-reduces a layer share what is saved; and only half of 70 ms is saved",
                      (EVEN_US + 1e6 * EACH / 400e9) * CALLS / EVEN_US: "that is all of them; one of 160 is "
                                                                        "asked for",
                      1e-3: "in µs", 1e-6: "in µs"}),
        Answer("kv_kb", KV / 1e3, "kB", rel=0.002,
               why="16 ranks and 8 KV heads: a rank cannot hold less than a head, so each is held twice",
               hint="keys and values x 80 layers x 1 head x 128 x 2 bytes",
               slips={0.5: "half a head does not exist, and neither does a cache of keys without values",
                      8.0: "each rank holds the heads that its queries need: one",
                      4.0: "64 / 16 are query heads; only KV heads are cached",
                      64.0: "64 heads ask; the 8 KV heads are cached, and a rank holds one",
                      1 / 80: "that is one layer; there are 80",
                      1e3 / 1024: "that is in KiB (1,024 bytes); the key asks for kB (1,000)"}),
        Answer("bubble", 3 / 11, "share of the time", rel=0.002,
               why="(S - 1) / (M + S - 1): each stage works for 8 of 11 ticks",
               hint="4 stages, 8 micro-batches: the last one leaves after 8 + 3 ticks",
               slips={3 / 8 / (3 / 11): "that is idle over busy; asked for is idle over all",
                      4 / 12 / (3 / 11): "S - 1, not S: a stage's own tick is no wait",
                      8 / 3: "that is the busy share", 100.0: "a share, not a percentage",
                      4 / 3: "S - 1 ticks to fill, not S: stage 0 does not wait",
                      11 / 12: "S - 1 above and below: 8 + 3 ticks in all",
                      11 / 3 * 0.75: "that is one micro-batch: (S - 1) / S"}),
    ],
)  # fmt: skip
