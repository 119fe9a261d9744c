"""What every test shares: two quiet threads, one embedded model, tiny random models of each family."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

from minillm.bench.main import _find_kernels

_find_kernels()  # where minillm is a checkout and not installed, as on a bare GPU machine

settings.register_profile("minillm", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("minillm")


@pytest.fixture(scope="session")
def embedded_folder():
    from minillm.models.hub import resolve

    return resolve()


@pytest.fixture(scope="session")
def tokenizer(embedded_folder):
    from minillm.models.tokenizer import Tokenizer

    return Tokenizer(embedded_folder)


@pytest.fixture(scope="session")
def llm(embedded_folder):
    """The embedded model in fp32, shared by the tests that only read it."""
    from minillm import LLM

    return LLM(embedded_folder, dtype="float32", max_model_len=512)


@pytest.fixture(scope="session")
def reference(embedded_folder):
    """The same model in the transformers library: the oracle."""
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
