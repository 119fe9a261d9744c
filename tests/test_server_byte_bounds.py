"""A text never has fewer tokens than its bytes prove, in every family of tokenizers; what proves nothing says so."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from minillm.server.admission import least_tokens
from minillm.server.byte_bounds import NFC_SHRINKS, ByteBound, byte_bound

NAMES = sorted(pre_tokenizers.ByteLevel.alphabet())
HEX = [f"<0x{b:02X}>" for b in range(256)]


def byte_level(normalizer=None, before=(), drop=(), **added):
    names = [n for n in NAMES if n not in drop] + ["Ġthe", "ab", "abc"]
    t = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, [("a", "b"), ("ab", "c")]))
    t.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if normalizer is not None:
        t.normalizer = normalizer
    t.add_special_tokens([AddedToken("<|end|>", special=True, **added)])
    return t


def fallback(letters=HEX):
    names = ["<unk>", *letters, "▁", "a", "b", "▁a", "▁▁▁▁"]
    merges = [("▁", "a"), ("▁▁", "▁▁"), ("▁", "▁")]
    names.append("▁▁")
    t = Tokenizer(models.BPE(
        {n: i for i, n in enumerate(names)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    ))  # fmt: skip
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return t


FAMILIES = {
    "byte-level": byte_level(), "byte-level, NFC": byte_level(normalizers.NFC()), "byte fallback": fallback(),
    "byte-level without some bytes": byte_level(drop=("Ġ", "Ċ", "k", "Ã")),
}  # fmt: skip
SHORTENED = [
    "\u212a",
    "\u1112\u1161\u11ab",
    "\u1fef",
    "\u2126\u0314\u0342\u0345",
    "K",
    " ",
    "abc",
    "<|end|>",
    "é",
    "👍",
]


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.one_of(st.text(), st.lists(st.sampled_from(SHORTENED)).map("".join)))
@settings(max_examples=200)
def test_a_text_has_at_least_the_tokens_that_its_bytes_prove(family, text):
    backend = FAMILIES[family]
    bound = byte_bound(backend)
    assert bound is not None
    assert len(backend.encode(text, add_special_tokens=False).ids) >= least_tokens(bound.count(text), bound.longest)


def test_the_bound_is_reached_so_a_smaller_one_would_be_wrong():
    backend = FAMILIES["byte-level"]
    longest = byte_bound(backend).longest
    text = "<|end|>" * 10
    assert (
        len(backend.encode(text).ids) == 10 == least_tokens(len(text), longest) < least_tokens(len(text), longest - 1)
    )


def test_bytes_that_a_tokenizer_drops_are_not_counted():
    backend = byte_level(drop=("Ġ",))
    bound = byte_bound(backend)
    assert bound.dropped == b" "
    assert backend.encode(" " * 1000).ids == []
    assert least_tokens(bound.count(" " * 1000), bound.longest) == 0 < least_tokens(1000, bound.longest)


def test_half_a_surrogate_pair_is_counted_and_not_an_error():
    assert ByteBound(4).count("a\ud800") == 4


def test_nfc_shortens_no_character_more_than_it_says():
    """Every character against its longest canonical spelling: of each piece the longest that means the same."""
    spellings: dict[str, int] = {}
    for c in map(chr, [*range(0xD800), *range(0xE000, 0x110000)]):
        full = unicodedata.normalize("NFD", c)
        spellings[full] = max(spellings.get(full, 0), len(c.encode()))

    def longest(full):
        best = [0] + [0] * len(full)
        for end in range(1, len(full) + 1):
            best[end] = max(best[k] + spellings.get(full[k:end], 0) for k in range(end))
        return best[-1]

    worst = max(longest(full) / len(unicodedata.normalize("NFC", full).encode()) for full in spellings)
    assert NFC_SHRINKS - 1 < worst <= NFC_SHRINKS


def test_the_embedded_tokenizer_proves_something(tokenizer):
    bound = byte_bound(tokenizer.backend)
    assert bound is not None
    for text in ("The capital of France is Paris. " * 50, "\x04" * 1000, "<|im_start|>" * 50, " " * 1000):
        assert least_tokens(bound.count(text), bound.longest) <= len(tokenizer.encode(text))
    assert bound.count("\x04" * 1000) == 0


def test_what_may_lose_bytes_proves_nothing():
    spaces = pre_tokenizers.Split(" ", "removed")
    for backend in (
        byte_level(normalizers.Strip()), byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
        byte_level(normalizers.NFC(), drop=("Ġ",)), byte_level(before=[spaces]),
        byte_level(lstrip=True), byte_level(rstrip=True),
        fallback(HEX[:-1]), Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        Tokenizer(models.Unigram([("<unk>", 0.0)], 0)),
    ):  # fmt: skip
        assert byte_bound(backend) is None, json.loads(backend.to_str())["normalizer"]
    short = byte_level()
    short.enable_truncation(4)
    assert byte_bound(short) is None


@pytest.mark.parametrize(
    ("size", "longest", "least"), [(0, 7, 0), (1, 7, 1), (7, 7, 1), (8, 7, 2), (99, None, 0), (0, None, 0)]
)
def test_least_tokens(size, longest, least):
    assert least_tokens(size, longest) == least
