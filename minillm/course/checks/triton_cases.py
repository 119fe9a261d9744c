"""Cases for answers that launch Triton kernels: guarded inputs, counted bytes, and nothing done in torch on the side.

    kernel_case(...)    the result, with guards around every tensor: a load or store outside says program and element
    traffic_case(...)   the result, and the bytes that its loads and stores asked for, equal to an analytic count

A lesson that uses them has `allow=KERNELS`. Both run an answer under `kernel_watch`, in the process of the answer, and
judge its record here. Earns nothing: an answer without a kernel; a result that torch made or changed; a kernel that
loads what torch prepared; an out-of-bounds access, also one whose error the answer swallows. Lessons 04 to 08.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minillm.course.candidate import Candidate, CandidateError
from minillm.course.tasks import Case, Wrong

KERNELS = (
    "minillm.config", "minillm.errors", "minillm.kernels", "minillm.kernels.triton_private", "minillm.kernels.traffic",
)  # fmt: skip
Bytes = Callable[..., tuple[int, int]]  # the arguments of an answer -> bytes (loaded, stored)


def kernel_case(
    name: str,
    args: Callable[[], Sequence[Any]],
    *,
    gaps: Mapping[int, int] | None = None,
    after: Sequence[int] = (),
    prepared: bool = False,
    **fields: Any,
) -> Case:
    """The answer's result, or (result, argument, ...) with the arguments `after` as the call left them.

    gaps      {2: 5}: five guards after each row of argument 2, so that its rows are not contiguous
    after     places of arguments that kernels write into; the task says `writes=True`
    prepared  the launcher may hand its kernels tensors that torch made
    fields    as in Case: points, why, hint, rel, abs
    """

    def run(answer: Candidate, *given: Any) -> Any:
        return _watched(answer, given, gaps, after, prepared)

    return Case(name, args, run=run, **fields)


def traffic_case(
    name: str,
    args: Callable[[], Sequence[Any]],
    analytic: Bytes,
    *,
    gaps: Mapping[int, int] | None = None,
    after: Sequence[int] = (),
    prepared: bool = False,
    hints: Mapping[tuple[float, float], str] | None = None,
    **fields: Any,
) -> Case:
    """As `kernel_case`, and the bytes asked for must be `analytic(*args)`: (loaded, stored).

    hints  {(1.5, 1.0): "..."}: shown when 1.5 times the bytes are loaded and just the bytes stored
    """

    def run(answer: Candidate, *given: Any) -> Any:
        result = _watched(answer, given, gaps, after, prepared)
        if not answer.reference:
            _same_bytes(answer.touched, analytic(*given), hints or {})
        return result

    return Case(name, args, run=run, **fields)


def _watched(
    answer: Candidate, given: Sequence[Any], gaps: Mapping[int, int] | None, after: Sequence[int], prepared: bool
) -> Any:
    if answer.reference:  # plain torch
        result = answer(*given)
    else:
        try:
            result = answer.watched(*given, gaps=dict(gaps or {}))
        except CandidateError as error:
            if "'function' object is not subscriptable" not in str(error):
                raise
            raise Wrong(str(error), "name[grid](...) needs a kernel: put @jit above its def") from None
        _honest(answer.touched, prepared)
    return (result, *(answer.after[i] for i in after)) if after else result


def _honest(touched: Mapping[str, int], prepared: bool) -> None:
    """Raise Wrong unless kernels, and nothing else, made the result out of the arguments."""
    if touched["refused"]:
        raise Wrong("a kernel reached outside its tensors, and the answer went on as if nothing had happened")
    if not touched["launches"]:
        raise Wrong(
            "no kernel ran", "define one with @jit (from minillm.kernels import jit) and launch it: name[grid](...)"
        )
    if touched["unstored"]:
        raise Wrong(
            f"{touched['unstored']} elements of what it gives back were stored by no kernel",
            "does every program store what it owns? Allocate with torch.empty, and leave the arithmetic to the kernel",
        )
    if touched["changed"]:
        raise Wrong(
            f"{touched['changed']} elements were changed after the kernel had stored them", "return what it stored"
        )
    if touched["prepared"] and not prepared:
        raise Wrong(
            f"the kernel loads {touched['prepared']} bytes that torch prepared",
            "let it load the arguments themselves: a copy (.contiguous(), .to()) is the traffic that fusion saves",
        )


def _same_bytes(touched: Mapping[str, int], want: tuple[int, int], hints: Mapping[tuple[float, float], str]) -> None:
    ratios = []
    problems = []
    for verb, bytes_ in zip(("loaded", "stored"), want):
        got = touched[verb]
        ratios.append(got / bytes_ if bytes_ else float(got > 0))
        if got != bytes_:
            problems.append(f"{bytes_:,} bytes should be {verb}, the kernel's masks let through {got:,}")
    if problems:
        found = (h for key, h in hints.items() if all(abs(k - r) < 1e-9 for k, r in zip(key, ratios)))
        raise Wrong("; ".join(problems), next(found, ""))
