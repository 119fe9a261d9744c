"""One latency a direction."""

TASK = "12.5"
POINTS = 5
HINT = "the latency is paid for each block"


def swap_or_recompute(
    full: int,
    stored: int,
    tail: int,
    block_size: int,
    block_bytes: int,
    token_s: float,
    write_rate: float,
    read_rate: float,
    latency: float,
) -> tuple[str, float, float]:
    recompute = (full * block_size + tail) * token_s
    write = (full - stored) * block_bytes / write_rate + (latency if full > stored else 0.0)
    read = full * block_bytes / read_rate + latency
    swap = write + read + tail * token_s
    return ("swap" if swap < recompute else "recompute"), recompute, swap
