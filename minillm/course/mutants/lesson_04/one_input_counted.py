"""The loads of one input only."""

TASK = "04.6"
POINTS = 5
HINT = "there are two inputs"


def read_ptx():
    threads, bytes_a_load = 128, 4 * 32 // 8
    elements = bytes_a_load // 2
    return {
        "threads": threads,
        "bytes_a_load": bytes_a_load,
        "elements_a_thread": elements,
        "elements_a_program": threads * elements,
        "misaligned_loads": elements,
    }
