"""Checks of exercise 04: fused kernels, run on guarded tensors with their bytes counted. References are in fused.py."""

from __future__ import annotations

import torch

from minillm.course.checks.fused import (
    add_rms_norm,
    add_rms_norm_with,
    norm_args,
    norm_bytes,
    padded,
    rope_args,
    rope_kv_with,
    rope_kv_write,
    rounded_args,
    row_bytes,
    softmax,
    softmax_with,
    swiglu,
    swiglu_bytes,
    swiglu_with,
)
from minillm.course.checks.tiny import randn
from minillm.course.checks.triton_cases import KERNELS, kernel_case, traffic_case
from minillm.course.tasks import Answer, Lesson, Mistake, Task, prediction

HALF = torch.float16

# 04.1 the prediction: 32 layers, hidden size 4096, intermediate size 14336, bf16, a prompt of 8192 tokens, 2 TB/s.
# Bytes of each element, operator by operator as the task lists them.
NORM = (2 + 2 + 2) + (2 + 4) + (4 + 4) + 4 + (4 + 4) + (4 + 2) + (2 + 2)
NORM_FUSED = 2 + 2 + 2 + 2
SWIGLU, SWIGLU_FUSED = (2 + 2) + (2 + 2 + 2), 2 + 2 + 2
TOKENS, LAYERS, WIDTH, INNER, BANDWIDTH = 8192, 32, 4096, 14336, 2e12
SAVED = LAYERS * TOKENS * (2 * WIDTH * (NORM - NORM_FUSED) + INNER * (SWIGLU - SWIGLU_FUSED))

# 04.6 what the two listings say
READ = [
    Answer("threads", 128, "threads a program", rel=0.0, why="`.reqntid` is the number of threads of one block",
           hint="four warps", slips={1 / 32: "those are warps; a warp has 32 threads"}),
    Answer("bytes_a_load", 16, "bytes", rel=0.0, why="`v4.b32`: four registers of 32 bits by one instruction",
           hint="4 x 32 bits", slips={8: "those are bits; the key asks for bytes", 0.25: "v4: four times b32"}),
    Answer("elements_a_thread", 8, "elements of each input", rel=0.0,
           why="the mask is judged once a thread and input: `@%p1` stands before one load of each",
           hint="an element of fp16 has 2 bytes",
           slips={2: "both inputs together; the key asks for one", 0.5: "an element of fp16 has 2 bytes, not 4"}),
    Answer("elements_a_program", 1024, "elements of each input", rel=0.0,
           why="`shl.b32 %r14, %r13, 10`: a program starts 2^10 elements after the one before",
           hint="threads x elements of a thread", slips={2: "both inputs together; the key asks for one"}),
    Answer("misaligned_loads", 16, "load instructions", points=2, rel=0.0,
           why="without the promise of alignment every element needs an instruction of its own",
           hint="8 elements of each of two inputs",
           slips={0.5: "there are two inputs", 1.5: "two inputs are loaded; the third array is stored"}),
]  # fmt: skip


LESSON = Lesson(
    "04",
    "triton_fusion",
    [
        prediction(
            "04.1",
            "Predict the bytes between the operators",
            [
                Answer("norm_unfused", NORM, "bytes an element", rel=0.002,
                       why="every operator reads its inputs from memory and writes its result there",
                       hint="seven operators; mean reads only, and the copies in fp32 have 4 bytes",
                       slips={34 / 42: "mean and the product with the weight move bytes, too",
                              28 / 42: "a fp32 element has 4 bytes", 0.5: "count reads and writes",
                              8: "those are bits; the key asks for bytes"}),
                Answer("norm_fused", NORM_FUSED, "bytes an element", rel=0.002,
                       why="x and residual in; norm and sum out: the fp32 numbers never leave the registers",
                       hint="two inputs, two outputs",
                       slips={0.75: "the sum must be stored as well: the next residual addition needs it",
                              2: "bf16 is two bytes, and what is stored is bf16"}),
                Answer("swiglu_ratio", SWIGLU / SWIGLU_FUSED, "times the bytes", rel=0.002,
                       why="silu(gate) is written and read again, and that is all the fusion saves",
                       hint="5 numbers an element unfused: read gate, write silu, read silu, read up, write",
                       slips={0.8: "silu(gate) is written and then read again: both count",
                              0.36: "the ratio is unfused over fused: above 1"}),
                Answer("saved_ms", SAVED / BANDWIDTH * 1e3, "ms", points=2, rel=0.005,
                       why="bytes that need not move, over the bandwidth",
                       hint="(two norms of 4096, one SwiGLU of 14336) x layers x tokens x bytes saved / 2e12",
                       slips={1e-3: "that is in seconds; the key asks for milliseconds",
                              1 / LAYERS: "that is one layer; the model has 32",
                              (WIDTH * 34 + INNER * 4) / (2 * WIDTH * 34 + INNER * 4): "a layer has two norms",
                              1 / TOKENS: "that is one token; the prompt has 8192"}),
            ],
        ),
        Task(
            "04.2", "softmax", "A kernel with a mask", softmax,
            [
                kernel_case("3 rows of 64", lambda: (randn(1, 3, 64),), why="the whole program is inside: no mask yet"),
                kernel_case("4 rows of 50", lambda: (randn(2, 4, 50),), points=2,
                            why="lanes 50 to 63 belong to the next row, or to nobody"),
                kernel_case("rows with 5 guards between them", lambda: (randn(3, 4, 33),), gaps={0: 5},
                            why="row i starts at i * x.stride(0), not at i * width"),
                kernel_case("numbers around -80 and 200",
                            lambda: (torch.cat((randn(4, 2, 21) - 80, randn(5, 2, 21) + 200)),),
                            why="exp of 200 overflows fp32, and a padded 0 would be the largest of a row around -80",
                            hint="subtract the row's maximum; what a mask leaves out must lose against every number"),
                traffic_case("fp16, its bytes", lambda: (randn(6, 5, 100, dtype=HALF),), row_bytes,
                             why="one program a row: the row is loaded once and stored once",
                             hints={(2, 1): "load the row once and keep it: a program's registers hold it",
                                    (3, 1): "load the row once and keep it: a program's registers hold it"}),
            ],
            rel=2e-3, abs=1e-5,
            mistakes=[
                Mistake("lanes outside must not count: other=-inf gives exp(-inf) = 0, other=0.0 gives a number",
                        lambda x: softmax_with(x, zeros=True)),
                Mistake("subtract the row's maximum before exp", lambda x: softmax_with(x, shift=False)),
                Mistake("a softmax of each row, not of each column", lambda x: softmax_with(x, columns=True)),
                Mistake("mask off by one: the last column is not part of the sum", lambda x: softmax_with(x, cut=1)),
            ],
        ),
        Task(
            "04.3", "add_rms_norm", "RMSNorm with the residual addition", add_rms_norm,
            [
                kernel_case("3 rows of 64", norm_args(11, 3, 64), why="no lane is masked"),
                kernel_case("3 rows of 100", norm_args(14, 3, 100), points=2,
                            why="the mean is of 100 numbers, whatever the program's width"),
                kernel_case("rows with gaps, of two kinds", norm_args(17, 3, 40), gaps={0: 3, 1: 9},
                            why="x and residual have strides of their own"),
                kernel_case("fp16, numbers near 300", norm_args(20, 2, 96, HALF, scale=300.0),
                            why="a square of 300 is beyond fp16: multiply in fp32",
                            hint=".to(tl.float32) right after the load"),
                kernel_case("fp16, sums that are rounded", rounded_args, rel=2e-4, abs=0.0,
                            why="1024 + 1025 is stored as 2048 in fp16: the norm is of what is stored",
                            hint="total = (x + r).to(TOTAL.dtype.element_ty), and then total.to(tl.float32)"),
                kernel_case("very small numbers", norm_args(23, 2, 48, scale=2e-3),
                            why="eps matters where the mean of squares is as small as eps"),
                traffic_case("its bytes", norm_args(26, 4, 100, HALF), norm_bytes,
                             why="a program for each row: x, residual and weight in; norm and sum out, once each",
                             hints={(5 / 3, 1): "each input once: what is loaded stays in registers",
                                    (4 / 3, 1): "each input once: the sum is in registers, do not load it again"}),
            ],
            rel=2e-3, abs=2e-4,
            mistakes=[
                Mistake("divide by D, not by BLOCK: masked lanes are no numbers of the row",
                        lambda x, *a: add_rms_norm_with(x, *a, over=padded(x.shape[1]))),
                Mistake("eps is added under the root", lambda *a: add_rms_norm_with(*a, outside=True)),
                Mistake("squares in fp16 overflow: convert to fp32 before you multiply",
                        lambda *a: add_rms_norm_with(*a, half=True)),
                Mistake("the norm is of the sum, not of x alone", lambda *a: add_rms_norm_with(*a, first=True)),
                Mistake("the norm is of the sum as it is stored: round it first, then square it",
                        lambda *a: add_rms_norm_with(*a, rounded=False)),
                Mistake("multiply by weight", lambda *a: add_rms_norm_with(*a, weighted=False)),
                Mistake("RMSNorm subtracts no mean", lambda *a: add_rms_norm_with(*a, centred=True)),
                Mistake("the second result is x + residual", lambda *a: add_rms_norm_with(*a, kept=False)),
                Mistake("a pair (norm, sum), in this order", lambda *a: add_rms_norm(*a)[::-1]),
            ],
        ),
        Task(
            "04.4", "swiglu", "SwiGLU on a grid of two axes", swiglu,
            [
                kernel_case("2 rows, I = 256", lambda: (randn(31, 2, 512),), why="two whole blocks a row"),
                kernel_case("3 rows, I = 150", lambda: (randn(32, 3, 300),), points=2,
                            why="behind the last gate stands the first up: a missing mask reads it"),
                kernel_case("rows with gaps", lambda: (randn(33, 3, 260),), gaps={0: 12},
                            why="the row's stride is not its width"),
                kernel_case("gates of 100 and -100", lambda: (randn(34, 2, 280, scale=60.0),),
                            why="exp(100) is inf in fp32: inf / inf is NaN, but 1 / (1 + inf) is 0",
                            hint="gate / (1 + exp(-gate)), or gate * tl.sigmoid(gate)"),
                traffic_case("fp16, its bytes", lambda: (randn(35, 2, 400, dtype=HALF),), swiglu_bytes,
                             why="gate and up in, the product out",
                             hints={(1.5, 1): "the gate once: what is loaded stays in registers"}),
            ],
            rel=2e-3, abs=1e-4,
            mistakes=[
                Mistake("the gate is the first half, and only it goes through silu",
                        lambda x: swiglu_with(x, swapped=True)),
                Mistake("the halves stand one after the other: up starts I elements after gate",
                        lambda x: swiglu_with(x, interleaved=True)),
                Mistake("exp(gate) overflows: use exp(-gate) in a denominator, where inf gives 0",
                        lambda x: swiglu_with(x, overflow=True)),
                Mistake("silu(g) = g * sigmoid(g), not sigmoid(g)", lambda x: swiglu_with(x, gate="sigmoid")),
                Mistake("silu, not gelu", lambda x: swiglu_with(x, gate="gelu")),
                Mistake("the gate goes through silu", lambda x: swiglu_with(x, gate="none")),
            ],
        ),
        Task(
            "04.5", "rope_kv_write", "Rotate, and write into pages", rope_kv_write,
            [
                kernel_case("one token, one head each", rope_args(41, 1, 1, 8, [5], [6]), after=(5, 6),
                            why="slot 6 of blocks of 4 tokens is place 2 of block 1"),
                kernel_case("four tokens in scattered slots", rope_args(44, 4, 2, 8, [3, 17, 0, 31], [9, 0, 7, 4]),
                            after=(5, 6), points=2, why="position and slot have nothing to do with each other"),
                kernel_case("padding among them", rope_args(47, 2, 1, 8, [2, 0, 5, 0], [1, -1, 11, -1]), after=(5, 6),
                            points=2, why="slot -1 is padding: nothing is written, whatever stands in that token",
                            hint="store keys and values only where slot >= 0"),
                kernel_case("head_dim 12: half a head is 6", rope_args(50, 3, 1, 12, [1, 2, 3], [5, 3, 8]),
                            after=(5, 6), why="tl.arange wants a power of two: lanes 6 and 7 need a mask"),
                kernel_case("heads with gaps", rope_args(53, 2, 2, 8, [9, 4], [2, 10]), after=(5, 6), gaps={0: 4},
                            why="token and head have strides of their own: qkv.stride(0), qkv.stride(1)"),
            ],
            rel=1e-3, abs=1e-5, limit_s=10, writes=True,
            mistakes=[
                Mistake("the sign of the sine: (a cos - b sin, b cos + a sin)",
                        lambda *a: rope_kv_with(*a, sign=-1)),
                Mistake("a pair is (x[i], x[i + d/2]), not two neighbours",
                        lambda *a: rope_kv_with(*a, pairs="neighbours")),
                Mistake("the angle belongs to the token's position, not to its place in the batch",
                        lambda *a: rope_kv_with(*a, by="index")),
                Mistake("the angle belongs to the token's position, not to its slot",
                        lambda *a: rope_kv_with(*a, by="slots")),
                Mistake("keys are rotated, too", lambda *a: rope_kv_with(*a, keys=False)),
                Mistake("values are never rotated", lambda *a: rope_kv_with(*a, values=True)),
                Mistake("a token lives in its slot, which is not its position",
                        lambda *a: rope_kv_with(*a, at="positions")),
                Mistake("keys go to k_pool, values to v_pool", lambda *a: rope_kv_with(*a, pools="vk")),
                Mistake("padding was written (to slot 0): store only where slot >= 0",
                        lambda *a: rope_kv_with(*a, padding="zero")),
                Mistake("padding was written (to the last slot): store only where slot >= 0",
                        lambda *a: rope_kv_with(*a, padding="last")),
            ],
        ),
        prediction("04.6", "Read what the compiler wrote", READ, name="read_ptx"),
    ],
    allow=KERNELS,
)  # fmt: skip
