"""What every test shares: one quiet thread, one embedded model, tiny random models of each family."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

# A second thread of a tiny model spins, waiting for work, longer than it computes: on two cores with anything beside
# them, tests take many times as long. Processes that tests start inherit this; kernels of lessons do not.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

with pytest.MonkeyPatch.context() as patch:
    for name, value in ONE_THREAD.items():
        patch.setenv(name, value)
    import torch  # reads them now

    from minillm.bench.main import _find_kernels

_find_kernels()  # where minillm is a checkout and not installed, as on a bare GPU machine
_LIBC = ctypes.CDLL(None) if os.name == "posix" else None

# The same examples in each run, so that a run fails because of a change and not by luck. New ones are looked for with
# `pytest --hypothesis-profile explore`; what it finds becomes an @example.
settings.register_profile("minillm", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("explore", settings.get_profile("minillm"), derandomize=False, print_blob=True)
settings.load_profile("minillm")


def pytest_collection_modifyitems(items):
    """nbval gives a kernel that has ended a cell five seconds to show its output: too few where the machine stalls."""
    for item in items:
        if hasattr(item, "output_timeout"):
            item.output_timeout = 60


def pytest_collection_finish():
    """What the imports made stays for good, so no collection need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Whatever ran before, a test that draws without a seed of its own draws the same."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # whatever an engine of the module before chose
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module", autouse=True)
def _given_back():
    """Engines that a failed test's traceback, a server or a thread still held go with the module: a model is 0.5 GB."""
    yield
    gc.collect()
    trim()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    if item.get_closest_marker("model"):
        trim()


def trim():
    """glibc keeps the pages of freed tensors, gigabytes over a run; it gives them back when asked."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt, also in a run that a shell has started with `&`, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def embedded_folder():
    from minillm.models.hub import resolve

    return resolve()


@pytest.fixture(scope="session")
def tokenizer(embedded_folder):
    from minillm.models.tokenizer import Tokenizer

    return Tokenizer(embedded_folder)


@pytest.fixture(scope="module")
def llm(embedded_folder):
    """The embedded model in fp32, shared by the tests of a file that only read it. With its cache it holds 1 GB."""
    from minillm import LLM

    return LLM(embedded_folder, dtype="float32", max_model_len=512)


@pytest.fixture(scope="module")
def reference(embedded_folder):
    """The same model in the transformers library: the oracle. 0.5 GB that few files need."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        embedded_folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def tiny_hf(family: str, **changes):
    """A small random model of the transformers library: `llama`, `llama3-rope`, `qwen2`, `qwen3` and variants."""
    import transformers as tr

    torch.manual_seed(0)
    base = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "attn_implementation": "eager",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    base |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    kinds = {
        "llama": (tr.LlamaConfig, tr.LlamaForCausalLM, {}),
        "llama-bias": (tr.LlamaConfig, tr.LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
        "llama3-rope": (
            tr.LlamaConfig,
            tr.LlamaForCausalLM,
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        "linear-rope": (
            tr.LlamaConfig,
            tr.LlamaForCausalLM,
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
        ),
        "qwen2": (tr.Qwen2Config, tr.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
        "qwen3": (tr.Qwen3Config, tr.Qwen3ForCausalLM, {"head_dim": 16}),
    }
    config_class, model_class, own = kinds[family]
    model = model_class(config_class(**(base | own | changes))).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide a mistake
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.2)
            assert torch.isfinite(p).all(), name
    return model


FAMILIES = ("llama", "llama-bias", "llama3-rope", "linear-rope", "qwen2", "qwen3")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """family -> a saved folder of `tiny_hf(family)`, made once; `shard` splits it into several files."""
    made = {}

    def make(family: str, shard: bool = False):
        if (family, shard) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{shard}")
            tiny_hf(family).save_pretrained(folder, **({"max_shard_size": "60KB"} if shard else {}))
            made[family, shard] = folder
        return made[family, shard]

    return make
