"""Compiled operators mean what the plain ones mean, for every number of rows, and are refused where they cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from minillm import LLM, EngineConfig, MinillmError, SamplingParams
from minillm.attention.causal import NoCacheAttention
from minillm.attention.protocol import Batch, Row
from minillm.config import ModelConfig
from minillm.models.compiled import CompiledOps, compile_ops
from minillm.models.transformer import TorchOps, Transformer
from minillm.models.weights import load_weights, random_weights
from minillm.quant import quantize_model

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # relative to the largest value; bf16 keeps 8 bits
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), reason="needs a C++ compiler"
)


def arguments(name, rows, dtype):
    """Random arguments of an operator, laid out as the model lays them out."""
    g = torch.Generator().manual_seed(rows)
    r = lambda *shape: torch.randn(*shape, generator=g).to(dtype)
    if name == "rope":  # a view: the queries and keys of [q | k | v]
        angle = torch.randn(rows, 1, 8, generator=g).repeat(1, 1, 2)
        cos, sin = TorchOps().angles(angle.cos().to(dtype), angle.sin().to(dtype))
        return r(rows, 5, 16)[:, :4], cos, sin
    return {
        "rms_norm": lambda: (r(rows, 40), r(40), EPS),
        "add_rms_norm": lambda: (r(rows, 40), r(rows, 40), r(40), EPS),
        "swiglu": lambda: (r(rows, 2 * 40),),
    }[name]()


def plain(name, args):
    """The operator in fp64 of the same inputs."""
    return getattr(TorchOps64, name)(*(a.double() if isinstance(a, torch.Tensor) else a for a in args))


class TorchOps64:
    """As `TorchOps`, which takes the mean of squares in fp32."""

    @staticmethod
    def rms_norm(x, weight, eps):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    @staticmethod
    def add_rms_norm(x, residual, weight, eps):
        return TorchOps64.rms_norm(x + residual, weight, eps), x + residual

    swiglu = staticmethod(TorchOps().swiglu)
    rope = staticmethod(TorchOps().rope)


def error(got, want):
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True)
    return max(float((g.double() - w).abs().max() / w.abs().max()) for g, w in pairs)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def ops(request):
    return request.param, CompiledOps()


def call(ops, name, args):
    if name == "rope":
        args = (args[0], *ops.angles(*args[1:]))
    return getattr(ops, name)(*args)


@needs_compiler
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "swiglu", "rope"])
def test_an_operator_equals_its_formula_for_every_number_of_rows(ops, name):
    dtype, ops = ops
    with torch.inference_mode():
        for rows in (8, 1, 2, 3, 33, 300):
            args = arguments(name, rows, dtype)
            got, want = call(ops, name, args), plain(name, args)
            assert error(got, want) < TOLERANCE[dtype]
            wrong = plain(name, (args[0] * 1.05, *args[1:]))  # a slip that the tolerance must see
            if name != "rms_norm":  # which does not feel a factor
                assert error(got, wrong) > TOLERANCE[dtype]
    assert len([key for key in ops._loops if key[0] == name]) == 1, "one loop serves every number of rows"


@needs_compiler
def test_another_shape_or_epsilon_gets_a_loop_of_its_own():
    ops = CompiledOps()
    x, w = torch.full((2, 16), 1e-3), torch.ones(16)
    small, large = ops.rms_norm(x, w, 1e-6), ops.rms_norm(x, w, 1.0)
    torch.testing.assert_close(small, TorchOps().rms_norm(x, w, 1e-6), rtol=1e-5, atol=0)
    torch.testing.assert_close(large, TorchOps().rms_norm(x, w, 1.0), rtol=1e-5, atol=0)
    assert not torch.allclose(small, large)


def logits(model, ids):
    with torch.inference_mode():
        return model.logits(model.forward(Batch.build([Row(0, 0, len(ids))], ids), NoCacheAttention()))


@needs_compiler
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_model_gives_the_same_logits(quantization, tiny_folder):
    """Qwen3 normalises its heads, which is a shape and a layout of its own."""
    folder = tiny_folder("qwen3")
    config = ModelConfig.from_folder(folder)
    model = Transformer(config, load_weights(folder, config, torch.float32), pack=quantization is None)
    if quantization:
        quantize_model(model, quantization)
    prompts = [[3], [3, 1], [(7 * i) % config.vocab_size for i in range(50)]]
    want = [logits(model, ids) for ids in prompts]
    compile_ops(model)
    loops = set(model.ops._loops)
    for ids, w in zip(prompts, want, strict=True):
        assert (logits(model, ids) - w).abs().max() < 1e-5 * w.abs().max()
    assert set(model.ops._loops) == loops, "everything was compiled when compile_ops returned"


@needs_compiler
def test_an_engine_that_compiles_says_the_same_greedily(make_llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[1, 2, 3], [(5 * i) % 97 for i in range(40)], [9]]
    said = [[r.outputs[0].token_ids for r in make_llm(compile=c).generate(prompts, params, use_tqdm=False)]
            for c in (False, True)]  # fmt: skip
    assert said[0] == said[1]
    assert type(make_llm(compile=True).engine.model.ops) is CompiledOps


@pytest.fixture
def make_llm(tiny_folder, tmp_path):
    from tokenizers import Tokenizer, models

    folder = shutil.copytree(tiny_folder("qwen3"), tmp_path / "model")
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return lambda **options: LLM(folder, dtype="float32", num_kv_blocks=24, max_model_len=96, **options)


@pytest.mark.parametrize("cxx", [{}, {"CXX": ""}, {"CXX": "/nowhere/c++"}], ids=["unset", "empty", "missing"])
def test_without_a_compiler_loading_says_what_to_install(make_llm, tmp_path, cxx):
    """In a process of its own: inductor remembers the compiler that it found."""
    folder = tmp_path / "model"
    code = (
        f"from minillm import LLM, MinillmError\ntry:\n    LLM({str(folder)!r}, dtype='float32', compile=True)\n"
        "except MinillmError as e:\n    print(e)\n"
    )
    nothing = {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"} | cxx
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=nothing)
    assert "compile=True needs a C++ compiler" in done.stdout
    assert "CXX" in done.stdout
    assert done.stderr == ""


def test_a_failed_compilation_is_an_error_in_words(monkeypatch):
    import torch._inductor.compile_fx as inductor

    def broken(*args, **kwargs):
        raise RuntimeError("fatal error: Python.h: No such file or directory")

    monkeypatch.setattr(inductor, "compile_fx_inner", broken)
    with pytest.raises(MinillmError, match=r"could not be compiled.*leave compile=False.*Python\.h"):
        CompiledOps().swiglu(torch.ones(2, 8))


def test_where_nothing_would_be_compiled_the_option_is_refused(tiny_folder):
    with pytest.raises(MinillmError, match="batch_invariant"):
        EngineConfig(compile=True, batch_invariant=True)
    with pytest.raises(MinillmError, match="compile must be True or False"):
        EngineConfig(compile="yes")
    config = ModelConfig.from_folder(tiny_folder("llama"))
    model = Transformer(config, random_weights(config))
    model.device = torch.device("cuda")
    with pytest.raises(MinillmError, match="on a CPU, this one is on cuda"):
        compile_ops(model)
