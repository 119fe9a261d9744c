"""Answers that run on ranks: the world of the checks, in a notebook and in the sandbox, and what it says of slips."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from disagg_pair import until

from minillm.course import grade, ranks
from minillm.course import notebook as nbk
from minillm.course.candidate import Candidate, CandidateError, NotAttempted, OverTimeError, local
from minillm.course.ranks import KINDS, RanksStuck, run
from minillm.course.report import result_text
from minillm.course.session import Limits
from minillm.parallel.group import run_threads

ROOT = Path(__file__).parents[1]
PATIENT_S = 600.0  # for a call that comes back, of a machine that is busy with other things, or stood still


def everything(group, seed):
    """Each method once; returns plain data that depends on all of them."""
    x = torch.full((2, 3), 1.0 + group.rank + seed)
    said = [group.all_reduce(x.clone()), *group.all_gather(x), group.broadcast(x.clone(), group.size - 1)]
    if group.size > 1:
        group.send(x, (group.rank + 1) % group.size)
        said.append(group.recv(torch.empty(2, 3), (group.rank - 1) % group.size))
    return [t.tolist() for t in said]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_it_is_the_world_of_threads(size):
    results, said = run(everything, [[0.5]] * size, KINDS)
    assert results == run_threads(size, lambda group: everything(group, 0.5))
    kinds = ["all_reduce", "all_gather", "broadcast"] + (["send", "recv"] if size > 1 else [])
    assert [k for k, _, _, _ in said[-1]] == kinds
    assert all(numbers == 6 and nbytes == 24 for rank in said for _, _, numbers, nbytes in rank)


def leaves_one_out(group):
    if group.rank != 1:
        group.all_reduce(torch.ones(1))


def two_kinds(group):
    group.all_reduce(torch.ones(1)) if group.rank else group.all_gather(torch.ones(1))


def two_sources(group):
    group.broadcast(torch.ones(1), group.rank)


def nobody_sends(group):
    group.recv(torch.ones(1), (group.rank + 1) % group.size)


@pytest.mark.parametrize(("work", "words"), [
    (leaves_one_out, "rank 0 is in all_reduce, rank 1 has returned, rank 2 is in all_reduce"),
    (two_kinds, "rank 0 is in all_gather, rank 1 is in all_reduce"),
    (two_sources, "rank 0 is in broadcast from 0, rank 1 is in broadcast from 1"),
    (nobody_sends, "rank 0 is in recv from 1, rank 1 is in recv from 2, rank 2 is in recv from 0"),
])  # fmt: skip
def test_who_waits_for_whom_is_told_at_once(work, words):
    with pytest.raises(RanksStuck, match=words):
        run(work, [[]] * 3, KINDS)
    with pytest.raises(CandidateError, match="the ranks wait for each other"):
        local(work, PATIENT_S).on_ranks([[]] * 3, KINDS)


@pytest.mark.parametrize(("work", "words"), [
    (lambda group: group.all_reduce(torch.ones(1)), "this task's group has send and recv, not all_reduce"),
    (lambda group: group.send(torch.ones(1), group.rank), "cannot send with rank"),
    (lambda group: group.send(torch.ones(1), 7), "cannot send with rank 7"),
    (lambda group: group.send([1.0], 1 - group.rank), "send takes a tensor, got a list"),
    (lambda group: [group.send(torch.ones(1), 1 - group.rank) for _ in range(2_000)], "has said 1000 things"),
    (lambda group: (group.send(torch.ones(2), 1 - group.rank), group.recv(torch.ones(3), 1 - group.rank)),
     r"sent \[2\] float32, and rank . expects \[3\] float32"),
    (lambda group: (group.send(torch.ones(2).half(), 1 - group.rank), group.recv(torch.ones(2), 1 - group.rank)),
     r"sent \[2\] float16, and rank . expects \[2\] float32"),
])  # fmt: skip
def test_wrong_words_are_sentences(work, words):
    with pytest.raises(CandidateError, match=words):
        local(work, PATIENT_S).on_ranks([[]] * 2, ["send", "recv"])


def test_a_broadcast_has_a_source_that_is_there():
    with pytest.raises(CandidateError, match="there is no rank 7 to broadcast, only 0 to 1"):
        local(lambda g: g.broadcast(torch.ones(1), 7), PATIENT_S).on_ranks([[]] * 2, KINDS)


def test_shapes_must_agree():
    with pytest.raises(CandidateError, match=r"one shape and dtype on all ranks, got \[1\] float32, \[2\] float32"):
        local(lambda g: g.all_gather(torch.ones(1 + g.rank)), PATIENT_S).on_ranks([[]] * 2, KINDS)


def test_a_rank_that_never_ends_is_ended():
    def spins(group):
        while group.rank == 1:
            pass
        group.all_reduce(torch.ones(1))

    before = set(threading.enumerate())
    with pytest.raises(OverTimeError):
        local(spins, 0.2).on_ranks([[]] * 3, KINDS)
    until(lambda: set(threading.enumerate()) <= before)


def test_a_time_limit_that_rings_before_the_end_has_begun_leaves_no_rank_behind(monkeypatch):
    """On a busy machine it rings again, after it has broken the ranks off and before anybody has told them."""
    end, rings = ranks.World.end, [OverTimeError("again")]

    def late(world):
        if rings:
            raise rings.pop()
        end(world)

    before = set(threading.enumerate())
    monkeypatch.setattr(ranks.World, "end", late)
    with pytest.raises(OverTimeError, match="again"):
        run(leaves_one_out, [[]] * 3, KINDS)
    until(lambda: set(threading.enumerate()) <= before, seconds=20.0)


def test_stubs_errors_and_changed_inputs_are_told():
    def stub(group):
        raise NotImplementedError

    def writes(group, x):
        x.add_(group.rank)

    with pytest.raises(NotAttempted):
        local(stub, PATIENT_S).on_ranks([[]] * 2, KINDS)
    one = local(writes, PATIENT_S)
    one.on_ranks([[torch.ones(2)], [torch.ones(2)]], KINDS)
    assert one.changed == ["of rank 1"]
    with pytest.raises(CandidateError, match="ZeroDivisionError"):
        local(lambda g: 1 / (1 - g.rank), PATIENT_S).on_ranks([[]] * 2, KINDS)


ANSWERS = {  # the learner's own cells, in place of the solution's, and what is said of them
    "spins": ("while group.rank == 1:\n        pass", "did not come back within 1 s"),
    "waits": ("if group.rank == 0:\n        group.all_reduce(x)", "rank 0 is in all_reduce, rank 1 has returned"),
    "speaks too much": ("for _ in range(2_000):\n        group.all_reduce(x)", "has said 1000 things"),
}


@pytest.mark.parametrize("how", ANSWERS)
def test_graded_ranks_neither_hang_nor_cost_other_tasks_their_points(how, tmp_path, monkeypatch):
    """Only an answer that never comes back is not waited for."""
    limit = lambda task: 1.0 if (how, task) == ("spins", "14.3") else PATIENT_S
    monkeypatch.setattr(grade, "Candidate", lambda session, task, _: Candidate(session, task, limit(task)))
    body, words = ANSWERS[how]
    nb = nbk.read(ROOT / "solutions" / "14_tensor_parallel.ipynb")
    for cell in nbk.code_cells(nb):
        if cell["id"] == "task-14-3":
            cell["source"] = f"def parallel_mlp(group, x, gate_up, down, bias):\n    {body}\n    return x"
    path = tmp_path / "14_tensor_parallel.ipynb"
    nbk.write(path, nb)
    begun = set(threading.enumerate())
    graded = grade.grade_file(path, Limits(total_s=PATIENT_S, cell_s=PATIENT_S))
    assert graded.problems == []
    assert {r.task.id: r.status for r in graded.results if r.task.id != "14.3"} == {
        f"14.{i}": "full" for i in (1, 2, 4, 5, 6)
    }
    wrong = next(r for r in graded.results if r.task.id == "14.3")
    assert wrong.points == 0
    assert words in result_text(wrong)
    until(lambda: set(threading.enumerate()) <= begun)
