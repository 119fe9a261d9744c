"""What the storms of exercise 15.3 say of a machine that goes wrong: the fault that it has, and no other."""

from __future__ import annotations

import pytest

from minillm.course.checks.storms import stormy
from minillm.course.checks.transfer_slips import GivesBackLoaded
from minillm.course.checks.transfers import DecodeTransfer
from minillm.course.tasks import Wrong


def test_blocks_that_were_given_back_are_not_called_unwritten():
    with pytest.raises(Wrong, match="resumes on blocks that are not its own any more"):
        stormy(GivesBackLoaded, 15, 200)


def test_tokens_that_never_came_are_counted():
    believes = type("Believes", (DecodeTransfer,), {"counts": False})
    with pytest.raises(Wrong, match=r"resumes on [1-9]\d* token positions that were never written"):
        stormy(believes, 15, 200)
