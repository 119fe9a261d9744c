"""Triton kernels, one idea a file: import name `minillm.kernels`.

Every kernel exists three times: a plain torch reference that can run in float64, an eager tiled twin that a debugger
can step through, and the Triton kernel with its launcher. On CPU tensors a launcher runs Triton's interpreter.

    triton_private.py   run on a CPU, count traffic, compile ahead
    checks.py           shapes, dtypes, strides: errors in words
    traffic.py          bytes that a launch loads and stores
    configs.py          tuned configurations, read from configs.json
"""
