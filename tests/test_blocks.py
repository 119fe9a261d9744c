"""The block allocator: nothing is lost, nothing is handed out twice, and every misuse is refused without a trace."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minillm.cache.blocks import BlockAllocator, OutOfBlocksError
from minillm.errors import MinillmError

TOTAL = 7


class Blocks(RuleBasedStateMachine):
    """Against a model: a list of holders, each with the blocks it was given or shares."""

    allocator_class = BlockAllocator

    def __init__(self):
        super().__init__()
        self.allocator = self.allocator_class(TOTAL)
        self.holders: list[list[int]] = []

    def held(self) -> set[int]:
        return {i for ids in self.holders for i in ids}

    @rule(n=st.integers(0, TOTAL + 1))
    def allocate(self, n):
        if n > TOTAL - len(self.held()):
            try:
                self.allocator.allocate(n)
            except OutOfBlocksError:
                return
            raise AssertionError(f"{n} blocks were allocated, {TOTAL - len(self.held())} are free")
        ids = self.allocator.allocate(n)
        assert len(ids) == len(set(ids)) == n
        assert all(1 <= i <= TOTAL for i in ids), "block 0 is the padding block"
        assert not self.held() & set(ids), "a block in use was handed out"
        self.holders.append(ids)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        ids = data.draw(st.sampled_from(self.holders))
        self.allocator.share(ids)
        self.holders.append(list(ids))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data):
        ids = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.allocator.free(ids)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), wrong=st.integers(-3, TOTAL + 3))
    def misuse(self, data, wrong):
        if wrong in self.held():
            return
        ids = data.draw(st.sampled_from(self.holders))
        before = self.allocator.num_free
        for call in (self.allocator.free, self.allocator.share):
            try:
                call([*ids, wrong])
            except MinillmError:
                continue
            raise AssertionError(f"{call.__name__} took block {wrong}, which nobody holds")
        assert self.allocator.num_free == before

    @invariant()
    def conserved(self):
        self.allocator.check()
        assert self.allocator.num_free + len(self.held()) == TOTAL


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=50, stateful_step_count=30)


class LeaksOnShare(BlockAllocator):
    def share(self, ids):
        super().share(ids)
        super().share(ids)


class ForgetsTheCount(BlockAllocator):
    def free(self, ids):
        for i in ids:
            self._references[i] = 0
            self._free.append(i)


class HandsOutPadding(BlockAllocator):
    def __init__(self, n):
        super().__init__(n)
        self._free[0] = 0


class HalfAnAllocation(BlockAllocator):
    def allocate(self, n):
        return super().allocate(min(n, self.num_free))


@pytest.mark.parametrize("wrong", [LeaksOnShare, ForgetsTheCount, HandsOutPadding, HalfAnAllocation])
def test_a_wrong_allocator_is_noticed(wrong):
    machine = type("Wrong", (Blocks,), {"allocator_class": wrong})
    case = machine.TestCase
    case.settings = settings(
        max_examples=300,
        stateful_step_count=20,
        database=None,
        print_blob=False,
        derandomize=True,
        phases=[Phase.generate],
    )  # the same schedules every time: a mutant that is met once is always met
    with pytest.raises((AssertionError, MinillmError, ExceptionGroup)):
        case("runTest").runTest()


def test_freeing_a_block_twice_in_one_call_changes_nothing():
    allocator = BlockAllocator(3)
    ids = allocator.allocate(2)
    with pytest.raises(MinillmError, match="more often than it is held"):
        allocator.free([ids[0], ids[1], ids[0]])
    allocator.check()
    assert allocator.num_free == 1
    allocator.free(ids)
    assert allocator.num_free == 3


def test_check_sees_a_lost_and_a_doubled_block():
    allocator = BlockAllocator(3)
    allocator._free.pop()
    with pytest.raises(MinillmError, match="lost or doubled"):
        allocator.check()
    allocator = BlockAllocator(3)
    allocator._references[2] = 1
    with pytest.raises(MinillmError, match="lost or doubled"):
        allocator.check()


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "3"])
def test_a_cache_needs_blocks(n):
    with pytest.raises(MinillmError, match="whole number of blocks"):
        BlockAllocator(n)
