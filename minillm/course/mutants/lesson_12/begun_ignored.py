"""Blocks are taken from rows of this step."""

TASK = "12.4"
POINTS = 5
HINT = "skip them"


def make_room(me: int, need: int, free: int, blocks: list[int], begun: list[bool]) -> list[int]:
    gone = []
    while free < need:
        able = [i for i in range(len(blocks)) if i not in gone]
        victim = max(able)
        gone.append(victim)
        free += blocks[victim]
        if victim == me:
            break
    return gone
