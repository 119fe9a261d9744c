"""Every launcher, given what it must not be given: MinillmError or the right answer, never a crash of the process."""

from __future__ import annotations

import pytest
import torch
from minillm.kernels.flash_prefill import flash_prefill
from minillm.kernels.merge_splits import merge_splits
from minillm.kernels.paged_decode import paged_decode
from minillm.kernels.quant_linear import int4_linear, int8_linear
from minillm.kernels.rms_norm import add_rms_norm, rms_norm
from minillm.kernels.rope_kv import rope_kv_write
from minillm.kernels.sample import greedy, gumbel_sample
from minillm.kernels.swiglu import swiglu

from minillm.errors import MinillmError


def whole(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


def good(name):
    """Arguments that a launcher takes: blocks 0 to 4 of 16 tokens, two sequences."""
    g = torch.Generator().manual_seed(0)
    x = lambda *shape: torch.randn(*shape, generator=g)
    pools = x(5, 16, 1, 64), x(5, 16, 1, 64)
    tables = whole([1, 2], [3, 4])
    return {
        "rms_norm": (rms_norm, [x(3, 64), x(64), 1e-5]),
        "add_rms_norm": (add_rms_norm, [x(3, 64), x(3, 64), x(64), 1e-5]),
        "swiglu": (swiglu, [x(3, 64)]),
        "greedy": (greedy, [x(3, 61)]),
        "gumbel_sample": (gumbel_sample, [x(3, 61), torch.ones(3, 2, dtype=torch.int32), torch.ones(3)]),
        "int8_linear": (int8_linear, [x(3, 64), torch.ones(32, 64, dtype=torch.int8), torch.ones(32)]),
        "int4_linear": (
            int4_linear,
            [x(3, 64), torch.ones(32, 32, dtype=torch.uint8), torch.ones(32, 2), torch.ones(32, 2)],
        ),
        "merge_splits": (merge_splits, [x(2, 3, 4, 64), x(2, 3, 4)]),
        "paged_decode": (paged_decode, [x(2, 3, 64), *pools, tables, whole(17, 3), 32]),
        "flash_prefill": (
            flash_prefill,
            [x(5, 3, 64), x(5, 1, 64), x(5, 1, 64), *pools, tables, whole(0, 3, 5), whole(17, 0), 3],
        ),
        "rope_kv_write": (
            rope_kv_write,
            [x(3, 5, 64), x(20, 64), x(20, 64), torch.arange(3), whole(16, 17, -1, dtype=torch.int64), *pools, 3],
        ),
    }[name]


NAMES = (
    "rms_norm", "add_rms_norm", "swiglu", "greedy", "gumbel_sample", "int8_linear", "int4_linear", "merge_splits",
    "paged_decode", "flash_prefill", "rope_kv_write",
)  # fmt: skip
BENT = {
    "meta": lambda a: a.to("meta"),
    "None": lambda a: None,
    "list": lambda a: a.tolist(),
    "no rows": lambda a: a[:0],
    "no columns": lambda a: a[..., :0],
    "gaps": lambda a: torch.stack((a, a), -1)[..., 0],
    "a number": lambda a: a.sum(),
    "fp64": lambda a: a.double(),
    "bool": lambda a: a.bool(),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bend", BENT)
def test_a_bent_argument_is_refused_or_does_nothing(name, bend):
    launch, arguments = good(name)
    for i, a in enumerate(arguments):
        if not isinstance(a, torch.Tensor):
            continue
        try:
            out = launch(*arguments[:i], BENT[bend](a), *arguments[i + 1 :])
        except MinillmError:
            continue
        assert bend in ("no rows", "no columns"), f"argument {i} was taken"
        first = out[0] if isinstance(out, tuple) else out
        assert first.numel() == 0


@pytest.mark.parametrize("name", NAMES)
def test_tensors_elsewhere_are_refused_and_none_at_all_is_nothing(name):
    launch, arguments = good(name)
    each = lambda change: [change(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    with pytest.raises(MinillmError, match="is on meta; kernels run on cuda, and on cpu"):
        launch(*each(lambda a: a.to("meta")))
    right = launch(*arguments)
    got = launch(*each(lambda a: a.clone().requires_grad_() if a.is_floating_point() else a))
    torch.testing.assert_close(got, right, equal_nan=True)


TABLES = {
    "no blocks": ("block_tables", lambda t: t[:, :0], "must be 0 to 0"),
    "a block too few": ("block_tables", lambda t: t[:, :1], "must be 0 to 16"),
    "an id past the pool": ("block_tables", lambda t: t + 3, "must name blocks 0 to 4 .* got 4 to [56]"),
    "an id far away": ("block_tables", lambda t: t + 2**30, "must name blocks 0 to 4"),
    "a negative id": ("block_tables", lambda t: t - 3, "must name blocks 0 to 4 .* got -2"),
    "a length past the table": ("lens", lambda t: t + 30, "must be 0 to 32, .* got 33 to 47|got 30 to 47"),
    "a negative length": ("lens", lambda t: t - 18, "must be 0 to 32"),
    "a falling sum": ("cu_seqlens", lambda t: whole(0, 5, 3), "must rise from 0 to at most 5"),
    "a sum past the tokens": ("cu_seqlens", lambda t: whole(0, 3, 6), "must rise from 0 to at most 5"),
    "a sum that starts late": ("cu_seqlens", lambda t: whole(1, 3, 5), "must rise from 0"),
    "a sum that starts early": ("cu_seqlens", lambda t: whole(-1, 2, 5), "must rise from 0"),
}
PLACES = {
    "paged_decode": {"block_tables": 3, "lens": 4},
    "flash_prefill": {"block_tables": 5, "lens": 7, "cu_seqlens": 6},
}


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name in PLACES for fault in TABLES if TABLES[fault][0] in PLACES[name]]
)
def test_tables_that_lead_out_of_the_pool_are_refused_on_a_cpu(name, fault):
    which, change, words = TABLES[fault]
    launch, arguments = good(name)
    arguments[PLACES[name][which]] = change(arguments[PLACES[name][which]])
    if name == "paged_decode":
        arguments[-1] = min(32, 16 * arguments[3].shape[1])
    with pytest.raises(MinillmError, match=words):
        launch(*arguments)


@pytest.mark.parametrize("name", PLACES)
def test_what_lies_behind_a_sequences_last_block_may_be_anything(name):
    launch, arguments = good(name)
    right = launch(*arguments)
    tables = arguments[PLACES[name]["block_tables"]]
    tables[1, 1:] = 2**31 - 1
    torch.testing.assert_close(launch(*arguments), right)
