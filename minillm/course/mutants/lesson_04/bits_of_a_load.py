"""Bits for bytes."""

TASK = "04.6"
POINTS = 5.5
HINT = "those are bits"


def read_ptx():
    threads, bytes_a_load = 128, 4 * 32
    elements = 8
    return {
        "threads": threads,
        "bytes_a_load": bytes_a_load,
        "elements_a_thread": elements,
        "elements_a_program": threads * elements,
        "misaligned_loads": 2 * elements,
    }
