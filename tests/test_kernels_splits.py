"""How many parts a sequence is read in: from the machine and the length, and every token in exactly one part."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from minillm.kernels.splits import (
    LEAST,
    MOST,
    RESIDENT,
    SHORTEST,
    WAVES,
    evenness,
    multiprocessors,
    split_count,
    split_range,
)


@given(st.integers(1, 5000), st.integers(0, 200_000), st.integers(2, 300))
def test_enough_to_fill_the_card_and_none_too_short(programs, context, processors):
    n = split_count(programs, context, processors)
    assert 1 <= n <= MOST
    assert n == 1 or context // n >= SHORTEST
    full = programs * n >= LEAST * processors
    assert full or n == MOST or context // (n + 1) < SHORTEST  # fewer only where more would be too short
    assert n == 1 or programs * n <= WAVES * RESIDENT * processors or programs * (n - 1) < LEAST * processors


@given(st.integers(1, 5000), st.integers(1, 300))
def test_no_count_of_fewer_parts_is_as_even(programs, processors):
    n = split_count(programs, 200_000, processors)
    if processors > 1:
        for fewer in range(1, n):
            if programs * fewer >= LEAST * processors:
                assert evenness(programs * fewer, processors) < evenness(programs * n, processors)


def test_it_follows_machine_and_length():
    assert split_count(256, 4096, 132) == 1  # 256 on 132: two each, all but eight
    assert split_count(192, 4096, 132) == 2  # one would leave half of the multiprocessors with half the work
    assert split_count(512, 4096, 132) == 3  # one would fill 396 places, then 116
    assert split_count(8, 32768, 132) == 32
    assert split_count(8, 32768, 66) == 16
    assert split_count(8, 1024, 132) == 4  # by length
    assert split_count(8, 100, 132) == split_count(8, 0, 132) == split_count(0, 0, 132) == 1
    assert split_count(1, 10**6, 132) == MOST


def test_evenness():
    assert evenness(132, 132) == evenness(264, 132) == evenness(4 * 396, 132) == 1
    assert evenness(133, 132) == 133 / 264
    assert evenness(397, 132) == 397 / 792


@given(st.integers(0, 3000), st.integers(1, 40), st.sampled_from([16, 64, 128]))
def test_parts_cover_the_context_once(context, splits, tile):
    ranges = [split_range(context, s, splits, tile) for s in range(splits)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == context
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert all(first % tile == 0 or first == context for first, _ in ranges)


def test_a_cpu_runs_one_program_at_a_time():
    assert split_count(1, 4096, 1) == 1
    assert multiprocessors(torch.device("cpu")) == 1
