"""Devices of one kind, in nodes, and the links between them: what a plan is made for. Lesson 14 builds it."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.errors import MinillmError
from minillm.roofline.comm import LINKS, OF_DEVICE, Link
from minillm.roofline.device import DATASHEET, Device

MOST_DEVICES = 1024


@dataclass(frozen=True)
class Fleet:
    """Devices of one kind. within joins those of a node; `node` of them are in one, and between joins nodes.

    Ranks are placed in order: rank = (replica * pp + stage) * tp + rank within the stage, node after node.
    """

    device: Device
    count: int
    within: Link
    node: int | None = None
    between: Link | None = None

    def __post_init__(self) -> None:
        for name in ("count", "node"):
            v = getattr(self, name)
            if v is None and name == "node":
                continue
            if isinstance(v, bool) or not isinstance(v, int) or not 1 <= v <= MOST_DEVICES:
                raise MinillmError(f"{name} of devices is a whole number from 1 to {MOST_DEVICES}, got {v!r:.80}")
        if self.node is not None and self.count > self.node and self.between is None:
            raise MinillmError(f"{self.count} devices, {self.node} a node: say by which link the nodes are joined")

    def same_node(self, first: int, last: int) -> bool:
        return self.node is None or first // self.node == last // self.node

    def links(self, tp: int, pp: int, dp: int) -> tuple[Link, Link]:
        """Of the ranks of a stage, and from stage to stage: the slower one where any of them leaves a node."""
        far = self.between or self.within
        stages = [range(a, a + tp) for a in range(0, tp * pp * dp, tp)]
        tp_near = all(self.same_node(s[0], s[-1]) for s in stages)
        pp_near = all(
            self.same_node(a, b) for i in range(len(stages)) if (i + 1) % pp for a, b in zip(stages[i], stages[i + 1])
        )
        return (self.within if tp_near else far), (self.within if pp_near else far)


def fleet_of(
    name: str, count: int, within: str | None = None, node: int | None = None, between: str | None = None
) -> Fleet:
    """A fleet by the names of device.DATASHEET and comm.LINKS. Each device has the link that its datasheet names."""
    from minillm.roofline.comm import link
    from minillm.roofline.device import device

    key = name.lower()
    found = DATASHEET.get(key) or device(name)  # a name that is no device's is told before its link is asked for
    if within is None and key not in OF_DEVICE:
        raise MinillmError(f"no link is known for {name}; name one: {', '.join(LINKS)}")
    near = link(within if within is not None else OF_DEVICE[key])
    return Fleet(found, count, near, node, link(between) if between else None)
