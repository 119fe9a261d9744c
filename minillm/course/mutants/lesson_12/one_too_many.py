"""Enough is not enough."""

TASK = "12.4"
POINTS = 6
HINT = "stop as soon as the blocks are enough"


def make_room(me: int, need: int, free: int, blocks: list[int], begun: list[bool]) -> list[int]:
    gone = []
    while free <= need:
        able = [i for i in range(len(blocks)) if not begun[i] and i not in gone]
        victim = max(able)
        gone.append(victim)
        free += blocks[victim]
        if victim == me:
            break
    return gone
