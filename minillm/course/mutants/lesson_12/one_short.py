"""One block is missing."""

TASK = "12.4"
POINTS = 0
HINT = "go on until free >= need"


def make_room(me: int, need: int, free: int, blocks: list[int], begun: list[bool]) -> list[int]:
    gone = []
    while free + 1 < need:
        able = [i for i in range(len(blocks)) if not begun[i] and i not in gone]
        victim = max(able)
        gone.append(victim)
        free += blocks[victim]
        if victim == me:
            break
    return gone
