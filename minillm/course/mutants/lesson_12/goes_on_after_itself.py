"""It gives way, and takes others with it."""

TASK = "12.4"
POINTS = 7
HINT = "nothing left to make room for"


def make_room(me: int, need: int, free: int, blocks: list[int], begun: list[bool]) -> list[int]:
    gone = []
    while free < need and len(gone) < len(blocks) - sum(begun):
        able = [i for i in range(len(blocks)) if not begun[i] and i not in gone]
        victim = max(able)
        gone.append(victim)
        free += blocks[victim]
    return gone
