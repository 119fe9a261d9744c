"""Exercise 09's scheduler as a part of an engine: over shadows, and what is said when it returns nonsense."""

import pytest

from minillm.course.checks.batching import AddsTwice, KeepsFinished, Scheduler, Static
from minillm.course.checks.scheduler_part import scheduler_part
from minillm.course.checks.shadows import Game, first_fault
from minillm.errors import MinillmError
from minillm.policy import FirstCome
from minillm.scheduler import Limits
from minillm.shadow import ShadowCore


@pytest.mark.parametrize("roomy", [True, False])
def test_the_reference_has_no_fault(roomy):
    game = Game(roomy=roomy, whole=True, full=roomy)
    assert first_fault(range(20), game, scheduler=scheduler_part(Scheduler)) == ""


@pytest.mark.parametrize(("wrong", "words"), [(Static, "a place that is free"), (KeepsFinished, "ended and is still")])
def test_a_wrong_one_has(wrong, words):
    assert words in first_fault(range(20), Game(roomy=True, whole=True), scheduler=scheduler_part(wrong))


def core(kind, blocks=20):
    return ShadowCore(blocks, 4, FirstCome(), Limits(2, 64), make_scheduler=scheduler_part(kind))


def returns(rows):
    class Fixed(Scheduler):
        def schedule(self, behind, room):
            return rows

    return Fixed


@pytest.mark.parametrize(
    ("rows", "words"),
    [(None, "list of"), ([("1",)], "list of"), ([("7", 1)], "never added"), ([(1, 1)], "never added"),
     ([("1", 3)], "blocks"), ([("1", 4)], "behind by 3"), ([("1", True)], "behind by 3")],
)  # fmt: skip
def test_nonsense_is_said_in_words(rows, words):
    one = core(returns(rows))
    r = one.request([1, 2, 3], 2)
    one.add(r)
    one.step()
    assert r.finish_reason == "error"
    assert words in r.stop_reason


def test_room_is_all_or_nothing_and_taken_once():
    """A request of 3 tokens and 6 more needs two blocks to its end; asking again takes no third."""

    class Asks(Scheduler):
        def schedule(self, behind, room):
            self.answers = [room(e[2]) for e in self.queue + self.batch for _ in range(2)]
            return super().schedule(behind, room)

    one = core(Asks, blocks=3)
    first, second = (one.request([i, 2, 3], 6) for i in (1, 5))
    one.add(first)
    one.add(second)
    one.step()
    assert one.scheduler.mine.answers == [True, True, False, False]
    assert (len(first.block_ids), second.block_ids, second.num_computed_tokens) == (2, [], 0)
    one.finish_all()
    assert one.idle
    assert [r.finish_reason for r in (first, second)] == ["length", "length"]


def test_twice_is_refused_by_the_core():
    one = core(AddsTwice)
    r = one.request([1])
    one.add(r)
    with pytest.raises(MinillmError, match="before"):
        one.add(r)
