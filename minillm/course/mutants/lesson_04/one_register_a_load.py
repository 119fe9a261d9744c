"""v4 overlooked: four bytes by one load."""

TASK = "04.6"
POINTS = 5.5
HINT = "four times b32"


def read_ptx():
    threads, bytes_a_load = 128, 32 // 8
    elements = 8
    return {
        "threads": threads,
        "bytes_a_load": bytes_a_load,
        "elements_a_thread": elements,
        "elements_a_program": threads * elements,
        "misaligned_loads": 2 * elements,
    }
