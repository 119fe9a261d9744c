"""The one with the most blocks."""

TASK = "12.4"
POINTS = 7
HINT = "not the one with the most blocks"


def make_room(me: int, need: int, free: int, blocks: list[int], begun: list[bool]) -> list[int]:
    gone = []
    while free < need:
        able = [i for i in range(len(blocks)) if not begun[i] and i not in gone]
        victim = max(able, key=lambda i: (blocks[i], i))
        gone.append(victim)
        free += blocks[victim]
        if victim == me:
            break
    return gone
