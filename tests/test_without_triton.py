"""Triton is there on Linux only. Everywhere else all but the kernels must work, and what needs them must say so."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

HIDDEN = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Hide())
"""
NEEDS_IT = ("minillm.bench.kernels", "minillm.bench.kernel_cases", "minillm.course.kernel_watch")


def without_triton(code: str) -> str:
    """What this code prints in a process that has no Triton."""
    program = HIDDEN + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_module_but_the_kernels_can_be_imported():
    out = without_triton("""
        import importlib, pkgutil
        import minillm, minillm.kernels
        # The peers' workers are no modules of ours to import: other environments run them as scripts.
        skipped = (
            "minillm.kernels.", "minillm.course.mutants", "minillm.course.broken.", "minillm.bench.peer_workers.",
        )
        for m in pkgutil.walk_packages(minillm.__path__, "minillm."):
            if not m.name.startswith(skipped) and not m.name.endswith("__main__"):
                try:
                    importlib.import_module(m.name)
                except ModuleNotFoundError as error:
                    assert error.name == "triton", error
                    print(m.name)
        assert "triton" not in sys.modules
    """)
    assert sorted(out.split()) == sorted(NEEDS_IT)


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        ("TritonAttention(KVPool(ModelConfig(num_layers=1), 1, 16, torch.float32))", "attention_backend='torch'"),
        ("TritonOps()", "attention_backend='torch'"),
        ("quantize_model(SimpleNamespace(device=torch.device('cuda'), layers=[]), 'int8')", "plain weights"),
        ("importlib.import_module('minillm.commands.kernels').run(Namespace(jobs=None))", "Linux only"),
        ("importlib.import_module('minillm.bench.main')._step('kernels')", "Linux only"),
        ("importlib.import_module('minillm.bench.main')._step('launch')", "Linux only"),
    ],
)
def test_what_needs_it_says_so(call, instead):
    out = without_triton(f"""
        import importlib
        from argparse import Namespace
        from types import SimpleNamespace
        import torch
        from minillm.attention.triton import TritonAttention, TritonOps
        from minillm.cache.pool import KVPool
        from minillm.config import ModelConfig
        from minillm.errors import MinillmError
        from minillm.quant import quantize_model
        try:
            {call}
        except MinillmError as error:
            print(error)
    """)
    assert "Triton" in out
    assert instead in out
