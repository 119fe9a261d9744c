"""Small tokenizers of every family that minillm runs, built here, for the tests of text. Not a test file.

Each `Codec` has what `minillm.models.tokenizer.Tokenizer` has (decode, id_to_token, special_ids) over a backend of the
tokenizers library, and the definition of a request's text, written with nothing but `decode`.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "One, two; three. The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "User: more\n\nAssistant: a b c d. Count to ten, then count on; and so it goes on and on.",
    "你好，世界。再见，朋友。你好吗？ 你好 世界",
    "naïve café déjà vu résumé coöperate",
    "👩‍👩‍👧 👩 👧 😀😀 👍🏽 end",
    "สวัสดี नमस्ते שלום مرحبا",
]


class Codec:
    def __init__(self, backend: Tokenizer):
        self.backend = backend
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.size = backend.get_vocab_size(with_added_tokens=True)
        self.decoded = 0  # tokens given to decode so far

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        self.decoded += len(token_ids)
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str:
        return self.backend.id_to_token(token_id) or ""

    def special(self, name: str) -> int:
        return self.backend.token_to_id(name)

    def continuation(self, prompt: str, text: str) -> list[int]:
        """Token ids that come after the prompt's in `prompt + text` (the prompt's own must be a prefix)."""
        ids, start = self.encode(prompt + text), self.encode(prompt)
        assert ids[: len(start)] == start, (prompt, text)
        return ids[len(start) :]

    def text_after(self, prompt, output, skip_special_tokens: bool = True, keep_broken: bool = True) -> str:
        """The text of an output by definition: decode(prompt + output) after its common prefix with decode(prompt).

        keep_broken False leaves out the U+FFFD at the end, which may be half a character.
        """
        before = self.decode(prompt, skip_special_tokens)
        full = self.decode([*prompt, *output], skip_special_tokens)
        if not keep_broken:
            full = full.rstrip("\ufffd")
        same = 0
        while same < min(len(before), len(full)) and before[same] == full[same]:
            same += 1
        return full[same:]


def byte_level(add_prefix_space: bool = False) -> Codec:
    """GPT-2, Llama 3, Qwen, SmolLM: BPE over bytes; every byte is a token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>", "<|im_start|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator([*CORPUS, "literally <0x0A> in a text"], trainer)
    backend.add_tokens(["<tool>", "工具", "<0x0A>"])  # added, not special; the last one only looks like a byte token
    return Codec(backend)


def byte_fallback(decoder, normalizer, specials=("<unk>", "<s>", "</s>")) -> Codec:
    """Llama 2, TinyLlama, Mistral, Gemma: characters, and bytes <0xHH> for those that are not in the vocabulary."""
    words = ["▁the", "▁Count", "▁two", "hello", "▁a", "▁b", "▁▁", "▁end", "你好"]
    letters = sorted({c for line in CORPUS[:2] for c in line if c not in " \n"} | set("你好，▁é"))
    # Every word needs its merges: left to right, one character at a time.
    merges, pieces = [], []
    for word in words:
        for n in range(2, len(word) + 1):
            if (word[: n - 1], word[n - 1]) not in merges:
                merges.append((word[: n - 1], word[n - 1]))
                pieces.append(word[:n])
    names = dict.fromkeys([*specials, *(f"<0x{b:02X}>" for b in range(256)), *letters, *pieces])
    vocab = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizer
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    backend.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return Codec(backend)


def llama2() -> Codec:
    """The leading space is put there by the normalizer and stripped by the decoder."""
    return byte_fallback(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


def gemma() -> Codec:
    return byte_fallback(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        normalizers.Replace(" ", "▁"),
    )


def metaspace() -> Codec:
    """Sentencepiece with the Metaspace decoder, which drops the spaces of the very first token."""
    return byte_fallback(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="always")]),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


FAMILIES: dict[str, Codec] = {
    "byte level": byte_level(),
    "byte level, prefix space": byte_level(add_prefix_space=True),
    "llama 2": llama2(),
    "gemma": gemma(),
    "metaspace": metaspace(),
}
