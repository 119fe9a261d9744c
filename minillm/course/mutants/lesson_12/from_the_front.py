"""The first in the row gives way."""

TASK = "12.4"
POINTS = 2
HINT = "the first in it was promised progress"


def make_room(me: int, need: int, free: int, blocks: list[int], begun: list[bool]) -> list[int]:
    gone = []
    while free < need:
        able = [i for i in range(len(blocks)) if not begun[i] and i not in gone]
        victim = min(able)
        gone.append(victim)
        free += blocks[victim]
        if victim == me:
            break
    return gone
