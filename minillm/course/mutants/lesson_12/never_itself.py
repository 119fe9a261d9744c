"""The request spares itself."""

TASK = "12.4"
POINTS = 3
HINT = "the request itself can be the one"


def make_room(me: int, need: int, free: int, blocks: list[int], begun: list[bool]) -> list[int]:
    gone = []
    while free < need and any(not begun[i] and i not in [*gone, me] for i in range(len(blocks))):
        able = [i for i in range(len(blocks)) if not begun[i] and i not in [*gone, me]]
        victim = max(able)
        gone.append(victim)
        free += blocks[victim]
        if victim == me:
            break
    return gone
