"""All-reduces between real processes: a + 2 (N - 1) / N bytes / bandwidth fitted, sealed, and judged on other sizes.

gloo between CPU processes; with several GPUs NCCL between those. On a CPU also the ring by hand of parallel/ring.py, in
turn with the library's, so that lesson 14 can say what a library adds. (NCCL's sends wait for their receivers: a ring
of two, in which both send first, would stand still.)

Both the fit and what judges it come from WORLDS worlds of fresh processes, those of each number of ranks in turn: where
the system puts a world's threads, it stays as quick or slow as that for all its life. After the seal the sizes of the
fit are timed again beside the others: as far as they have moved, the machine has changed and not the law failed.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import replace
from typing import Any

import torch

from minillm.bench.common import Options
from minillm.parallel.group import Group
from minillm.parallel.processes import run_processes
from minillm.parallel.ring import ring_all_reduce
from minillm.roofline.comm import CALLS, SIZES, Link, Sample, fit, in_turns, per_call, timed
from minillm.roofline.evidence import seconds
from minillm.roofline.quantities_parallel import PARALLEL_GOALS

LARGE = tuple(65536 * 4**i for i in range(7))  # 64 kB to 256 MB: between GPUs, where the small ones are all latency
RING_BYTES = 262_144
WORLDS = {"gloo": 5, "nccl": 1}
ROUNDS = {"gloo": 15, "nccl": 30}  # of each world; of CALLS all-reduces of each size


def work(group: Group, sizes: list[int], rounds: int, ring_bytes: int, cuda: bool) -> dict[str, Any]:
    """What each rank does: seconds [rounds, sizes], of ring and library at one size, and whether all sums are right."""
    where = f"cuda:{group.rank}" if cuda else "cpu"
    taken: dict[str, Any] = {"sizes": timed(group, sizes, rounds, cuda), "ring": [], "library": []}
    x = torch.arange(1000.0, device=where) * (group.rank + 1)
    total = torch.arange(1000.0, device=where) * (group.size * (group.size + 1) // 2)
    right = True
    if not cuda:
        right = torch.equal(ring_all_reduce(group, x), total)
        pair = torch.zeros(ring_bytes // 4)
        sides = {"ring": lambda: ring_all_reduce(group, pair), "library": lambda: group.all_reduce(pair)}
        for i in range(rounds + 1):
            for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
                spent = per_call(sides[name], cuda)
                if i:  # the first touches memory
                    taken[name].append(spent)
    return taken | {"right": right and torch.equal(group.all_reduce(x), total)}


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slowest(ranks: list[dict[str, Any]], what: str) -> list[Any]:
    """By round: the time of the rank that took longest. For "sizes" a list, one for each."""
    rounds = zip(*(rank[what] for rank in ranks), strict=True)
    if what == "sizes":
        return [[max(each) for each in zip(*one, strict=True)] for one in rounds]
    return [max(one) for one in rounds]


class Collectives:
    """Fitted before the seal on every other size; predicted on those between.

    More ranks than a CPU has cores wait for each other's turns, of which the formula knows nothing. Their link is the
    others' with messages that wait (`comm.in_turns`), from their own times on the sizes of the fit; judged apart.
    """

    def __init__(self, options: Options, ranks: tuple[int, ...] = (2, 3)):
        cpu = options.on_cpu
        self.device, self.backend, self.ranks = ("cpu", "gloo", ranks) if cpu else ("cuda", "nccl", ranks)
        self.sizes = list(SIZES if cpu else LARGE)
        self.known = self.sizes[::2]
        self.rounds, self.worlds = ROUNDS[self.backend], WORLDS[self.backend]
        options.out(f"all-reduces of {' and '.join(map(str, self.ranks))} ranks over {self.backend}: the fit")
        self.crowded = [n for n in self.ranks if cpu and n > cores()]
        by_ranks = self._measure(self.known)
        self.seen: list[Sample] = [
            (size, n, statistics.median(each))
            for n in self.ranks for size, each in zip(self.known, zip(*by_ranks[n]["sizes"]), strict=True)
        ]  # fmt: skip
        free = [n for n in self.ranks if n not in self.crowded] or self.ranks[:1]
        self.link: Link = fit([s for s in self.seen if s[1] in free], self.backend)
        if len(free) == 1:  # all of a is start then; it is said in 2 (N - 1) messages
            self.link = replace(self.link, start=0.0, hop=self.link.start / (2 * (free[0] - 1)))
        self.in_turns = {n: in_turns(self.link, [s for s in self.seen if s[1] == n]) for n in self.crowded}

    def link_of(self, ranks: int) -> Link:
        """What joins so many ranks here."""
        return self.in_turns.get(ranks, self.link)

    def _measure(self, sizes: list[int]) -> dict[int, dict[str, Any]]:
        """By number of ranks: the slowest rank's times, of all worlds, and whether all sums were right."""
        arguments = {
            "sizes": sizes, "rounds": self.rounds, "ring_bytes": RING_BYTES, "cuda": self.device != "cpu"
        }  # fmt: skip
        found: dict[int, dict[str, Any]] = {
            n: {"sizes": [], "ring": [], "library": [], "right": True} for n in self.ranks
        }
        for _ in range(self.worlds):
            for n, taken in found.items():
                ranks = run_processes(n, "minillm.bench.collectives:work", arguments, backend=self.backend)
                for what in ("sizes", "ring", "library"):
                    taken[what] += slowest(ranks, what)
                taken["right"] &= all(rank["right"] for rank in ranks)
        return found

    @property
    def setup(self) -> dict[str, Any]:
        return {
            "link": self.link.to_dict(), "crowded": self.crowded, "backend": self.backend, "ranks": self.ranks,
            "in_turns": {n: link.to_dict() for n, link in self.in_turns.items()}, "worlds": self.worlds,
            "calls": CALLS, "fitted_on": self.seen, "ring_bytes": RING_BYTES,
        }  # fmt: skip

    def expect(self, book: Any) -> None:
        for n in self.ranks:
            for size in self.sizes:
                said = {"link": self.link_of(n).to_dict(), "nbytes": size, "ranks": n}
                book.expect(self._key(n, size), "all_reduce", **said)

    def _key(self, ranks: int, size: int) -> str:
        return f"{'again' if size in self.known else 'all_reduce'}.{ranks}.{size}"

    def measure(self, book: Any) -> None:
        found = self._measure(self.sizes)
        for n, taken in found.items():
            for size, each in zip(self.sizes, zip(*taken["sizes"]), strict=True):
                book.measured(self._key(n, size), each)
            if self.device == "cpu":
                for side in ("ring", "library"):
                    book.measured(f"{side}.{n}", taken[side])
                book.derive(f"ring_ratio.{n}", "ratio", [f"ring.{n}", f"library.{n}"])
        for name, ranks in (("", [n for n in self.ranks if n not in self.crowded]), ("crowded_", self.crowded)):
            keys = [self._key(n, size) for n in ranks for size in self.sizes]
            for kind, error in (("all_reduce", f"all_reduce.{name}error"), ("again", f"all_reduce.{name}again_error")):
                if mine := [key for key in keys if key.startswith(f"{kind}.")]:
                    book.derive(error, "prediction_error", mine)
        right = all(taken["right"] for taken in found.values())
        what = "an all-reduce and the ring give the sum" if self.device == "cpu" else "an all-reduce gives the sum"
        book.check(what, right, f"{self.ranks} ranks, {self.backend}, exact")

    @staticmethod
    def lines(record: dict[str, Any]) -> list[str]:
        setup = record["setup"]
        link = Link(**setup["link"])
        lines = [
            f"all-reduce over {setup['backend']}: {seconds(link.start)} + {seconds(link.hop)} a message, "
            f"{link.bandwidth / 1e9:.2f} GB/s"
        ]
        for key, which in (("error", ""), ("crowded_error", ", and of more ranks than cores")):
            if error := record["derived"].get(f"all_reduce.{key}"):
                again = record["derived"].get(f"all_reduce.{key.replace('error', 'again_error')}")
                moved = f"; on those it saw, timed again: {again['median']:.0%}" if again else ""
                lines.append(
                    f"on sizes the fit never saw{which}: off by {error['median']:.0%} in the median "
                    f"(at most {error['max']:.0%}; goal {PARALLEL_GOALS['all_reduce']:.0%}){moved}"
                )
        for key, e in record["results"].items():
            if key.startswith("all_reduce."):
                _, n, size = key.split(".")
                expected = record["predictions"][key]["prediction"]["expected"]
                lines.append(
                    f"  {n} ranks, {int(size):>11,} bytes {seconds(e['median']):>10} (p10 {seconds(e['p10'])}, "
                    f"p90 {seconds(e['p90'])}), predicted {seconds(expected)}"
                )
        for n in (n for n in setup["ranks"] if f"ring_ratio.{n}" in record["derived"]):
            e = record["derived"][f"ring_ratio.{n}"]
            lines.append(
                f"  {n} ranks: the ring by hand takes {e['median']:.2f} times the library's time for "
                f"{setup['ring_bytes']:,} bytes (p10 {e['p10']:.2f}, p90 {e['p90']:.2f})"
            )
        return lines
