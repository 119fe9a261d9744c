"""Warps for threads."""

TASK = "04.6"
POINTS = 5.5
HINT = "a warp has 32 threads"


def read_ptx():
    threads, bytes_a_load = 4, 4 * 32 // 8
    elements = bytes_a_load // 2
    return {
        "threads": threads,
        "bytes_a_load": bytes_a_load,
        "elements_a_thread": elements,
        "elements_a_program": 1024,
        "misaligned_loads": 2 * elements,
    }
