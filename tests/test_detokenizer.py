"""The incremental detokenizer: at every step exactly the text by definition, for every tokenizer family."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_families import FAMILIES, Codec

import minillm.models.detokenizer
from minillm.models.detokenizer import REPLACEMENT, WINDOW, IncrementalDetokenizer

TEXTS = [
    "Hello, world! The quick brown fox.",
    "你好，世界。再见，朋友。",
    "👩‍👩‍👧 family 👍🏽 and 🏴󠁧󠁢󠁥󠁮󠁧󠁿 flag 🇨🇳",
    "e\u0301 a\u0308 n\u0303 क्षि กำ ﷺ",
    "  two  spaces   three\n\n\ttab\r\n end ",
    "שלום مرحبا สวัสดี नमस्ते မြန်မာ",
    "a real \ufffd and \ufffd\ufffd at the end \ufffd",
    "<0x0A> is not a byte here, ▁ is not a space",
    "mixed 好a好b👍c\u200dd\ufeffe",
]


def check_stream(codec: Codec, prompt, output, skip=True, every_step=True):
    """All invariants of one stream of tokens."""
    detokenizer = IncrementalDetokenizer(codec, prompt, skip)
    text, name = "", lambda n: f"prompt {prompt} output {list(output[:n])}"
    for n, token in enumerate(output, 1):
        delta = detokenizer.append([token])
        text += delta
        if every_step:
            definition = codec.text_after(prompt, output[:n], skip)
            assert text + copy.copy(detokenizer).finish() == definition, name(n)
            # What is held back is no more than one U+FFFD, or the run of byte tokens at the end.
            held = definition[len(text) :]
            run = 0
            while run < n and is_byte_or_hidden(codec, output[n - 1 - run], skip):
                run += 1
            if run == 0:
                assert held in ("", REPLACEMENT), name(n)
            assert detokenizer.peek() in ("", held.rstrip(REPLACEMENT)), name(n)
    text += detokenizer.finish()
    assert text == codec.text_after(prompt, output, skip), name(len(output))
    assert detokenizer.finish() == ""
    return text


def is_byte_or_hidden(codec, token, skip):
    name = codec.id_to_token(token)
    return not name or (skip and token in codec.special_ids) or (len(name) == 6 and name.startswith("<0x"))


def check_texts(names=tuple(FAMILIES)):
    for name in names:
        codec = FAMILIES[name]
        for text in TEXTS:
            ids = codec.encode(text)
            for cut in range(len(ids) + 1):  # also inside characters
                check_stream(codec, ids[:cut], ids[cut:])
            assert check_stream(codec, [], ids) == codec.decode(ids)


def test_real_texts_cut_anywhere():
    check_texts()


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_and_output_make_the_text(name):
    """For valid text cut between characters, nothing subtle is left: prompt's text + output's text = the text."""
    codec = FAMILIES[name]
    for text in TEXTS:
        ids = codec.encode(text)
        for cut in range(len(ids) + 1):
            before = codec.decode(ids[:cut])
            if codec.decode(ids).startswith(before):
                assert before + check_stream(codec, ids[:cut], ids[cut:], every_step=False) == codec.decode(ids)


@st.composite
def streams(draw):
    """Any tokens at all: bad bytes, special tokens, byte runs, ids that no token has."""
    codec = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    nasty = [t for t in range(codec.size) if REPLACEMENT in codec.decode([t])]
    spaces = [t for t in range(codec.size) if set(codec.id_to_token(t)) <= {"▁", "Ġ"}]
    token = st.one_of(
        st.integers(0, codec.size - 1),
        st.sampled_from(nasty),
        st.sampled_from(spaces),
        st.sampled_from(sorted(codec.special_ids)),
        st.sampled_from([*codec.encode("你好👍é\n"), codec.size + 7]),
    )
    prompt = draw(st.lists(token, max_size=14))
    output = draw(st.lists(token, max_size=30))
    return codec, prompt, output, draw(st.booleans())


@settings(max_examples=1000, deadline=None)
@given(streams())
def test_any_tokens_in_any_family(stream):
    check_stream(*stream)


@settings(max_examples=200, deadline=None)
@given(streams(), st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_several_tokens_at_once(stream, sizes):
    """As a step with speculation gives them: the same deltas, joined."""
    codec, prompt, output, skip = stream
    one, many = (IncrementalDetokenizer(codec, prompt, skip) for _ in range(2))
    rest = list(output)
    for size in sizes * 30:
        chunk, rest = rest[:size], rest[size:]
        assert many.append(chunk) == "".join(one.append([t]) for t in chunk)


@pytest.mark.parametrize("name", FAMILIES)
def test_long_streams_cross_many_windows(name):
    codec, rng = FAMILIES[name], random.Random(4)
    for _ in range(20):
        size = rng.choice((WINDOW, 4 * WINDOW, 200))
        ids = [rng.randrange(codec.size) for _ in range(size)]
        check_stream(codec, ids[: size // 3], ids[size // 3 :], skip=rng.random() < 0.5)


def test_a_character_never_comes_in_halves():
    """A four-byte character in four tokens: nothing, nothing, nothing, the character."""
    codec = FAMILIES["byte level"]
    ids = [byte_token(codec, b) for b in "\U00010348".encode()]
    detokenizer = IncrementalDetokenizer(codec, codec.encode("x"))
    assert [detokenizer.append([t]) for t in ids] == ["", "", "", "\U00010348"]
    half = IncrementalDetokenizer(codec, [*codec.encode("x"), *ids[:2]])
    assert [half.append([t]) for t in ids[2:]] == ["", "\U00010348"], "begun in the prompt, completed by the output"
    never = IncrementalDetokenizer(codec, [*codec.encode("x"), *ids[:2]])
    assert never.append(codec.encode("y")) == "y", "a character that the prompt broke is the prompt's"


def byte_token(codec, byte):
    """The token of one byte: GPT-2's table gives printable bytes their own character, and the others U+0100 and on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in visible]
    return codec.special(chr(byte) if byte in visible else chr(256 + others.index(byte)))


def check_bad_run():
    """Why byte runs wait: decode() replaces the characters that were complete before the bad byte."""
    codec = FAMILIES["llama 2"]
    ids = [codec.special(f"<0x{b:02X}>") for b in "喵".encode()] + [codec.special("<0xFF>")]
    assert (codec.decode(ids[:3]), codec.decode(ids)) == ("喵", REPLACEMENT * 4)
    detokenizer = IncrementalDetokenizer(codec, codec.encode("a"))
    assert detokenizer.append(ids[:3]) == ""
    assert detokenizer.peek() == "喵", "but a stop string can see it"
    assert detokenizer.append(ids[3:]) == ""
    assert detokenizer.peek() == ""
    assert detokenizer.append([codec.special("b")]) == REPLACEMENT * 4 + "b"
    # A prompt that ends in bytes, as every prompt that ends in a newline does, is not repeated.
    newline = codec.special("<0x0A>")
    after = IncrementalDetokenizer(codec, [*codec.encode("a"), newline])
    assert after.append([newline]) == ""
    assert after.peek() == "\n"
    assert after.append([codec.special("b")]) == "\nb"


def test_a_run_that_turns_bad_takes_all_of_it():
    check_bad_run()


def check_cost():
    """Decoded tokens grow with the stream, not with its square; also when nothing in it is valid."""
    for name, codec in FAMILIES.items():
        bad = codec.special("<0xFF>") or byte_token(codec, 0xFF)
        for what, ids in {
            "text": (codec.encode(" ".join(TEXTS)) * 20)[:2000],
            "bad bytes": [bad] * 2000,
            "special tokens": [codec.special("<eos>")] * 2000,
        }.items():
            codec.decoded = 0
            detokenizer = IncrementalDetokenizer(codec, ids[:100])
            text = detokenizer.append(ids) + detokenizer.finish()
            assert codec.decoded < 2000 * 2.5 * WINDOW, f"{name}, {what}: {codec.decoded} tokens decoded for 2,000"
            assert text == codec.text_after(ids[:100], ids)


def test_cost_is_linear():
    check_cost()


def test_text_with_bad_bytes_goes_on_flowing():
    codec = FAMILIES["byte level"]
    detokenizer = IncrementalDetokenizer(codec, [])
    sent = [detokenizer.append([byte_token(codec, 0xFF)]) for _ in range(100)]
    assert sent == ["", *[REPLACEMENT] * 99]


# Mutants.


class DropsAByte(IncrementalDetokenizer):
    def _append(self, token):
        self._count = getattr(self, "_count", 0) + 1
        return super()._append(token) if self._count % 7 else ""


class OneTokenAtATime(IncrementalDetokenizer):
    def _append(self, token):
        return self._decode([token]) if self._visible(token) else ""

    def finish(self):
        return ""


class SendsHalves(IncrementalDetokenizer):
    def _append(self, token):
        return super()._append(token) + self.finish()


class RunsNotHeld(IncrementalDetokenizer):
    def _is_byte(self, token):
        return False


class NothingReleased(IncrementalDetokenizer):
    def finish(self):
        return ""


class ForgetsTheContext(IncrementalDetokenizer):
    """Drops the window after each complete text: a leading space is stripped where none is leading."""

    def _append(self, token):
        delta = super()._append(token)
        if not self._in_run and self._sent == len(self._decode(self._window)):
            self._window, self._sent = [], 0
        return delta


class RepeatsThePrompt(IncrementalDetokenizer):
    def __init__(self, *args):
        super().__init__(*args)
        self._owed = ""


class CountsHiddenTokensAsContext(IncrementalDetokenizer):
    def _visible(self, token):
        return True

    def _decode(self, tokens):
        return self._tokenizer.decode(tokens, bool(self._hidden))


MUTANTS = [
    DropsAByte, OneTokenAtATime, SendsHalves, RunsNotHeld, NothingReleased, ForgetsTheContext, RepeatsThePrompt,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    monkeypatch.setitem(globals(), "IncrementalDetokenizer", mutant)
    with pytest.raises(AssertionError):
        check_texts() or check_bad_run()


def test_a_window_that_is_never_cut_is_caught(monkeypatch):
    monkeypatch.setattr(minillm.models.detokenizer, "WINDOW", 10**9)
    with pytest.raises(AssertionError):
        check_cost()


def test_hidden_tokens_are_no_context(monkeypatch):
    """After a special token a decoder would take the next token for the first of the text, and strip its space."""

    def check():
        codec = FAMILIES["llama 2"]
        ids = [codec.special("<eos>")] * 3 * WINDOW + codec.encode("a")
        assert check_stream(codec, codec.encode("Hello"), ids) == " a"

    check()
    monkeypatch.setitem(globals(), "IncrementalDetokenizer", CountsHiddenTokensAsContext)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.model
def test_the_embedded_models_tokenizer():
    from minillm.models.hub import resolve
    from minillm.models.tokenizer import Tokenizer

    tokenizer = Tokenizer(resolve("smollm2-135m"))
    codec = Codec(tokenizer.backend)
    assert codec.special_ids == tokenizer.special_ids
    for text in TEXTS:
        ids = codec.encode(text)
        for cut in range(len(ids) + 1):
            check_stream(codec, ids[:cut], ids[cut:])
    rng = random.Random(1)
    for _ in range(30):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(60)]
        check_stream(codec, ids[:20], ids[20:])
