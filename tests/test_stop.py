"""Stop strings against a brute-force oracle, finish reasons, and the output processor on real tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_families import FAMILIES, Codec

import minillm.output
import minillm.stop
from minillm.models.detokenizer import IncrementalDetokenizer
from minillm.output import OutputProcessor
from minillm.request import Request, SamplingParams, TokenLogprob
from minillm.stop import StopStrings, border_table, check_finish

# 1. Stop strings alone.


def oracle(text: str, stops, include: bool):
    """Try every end, first to last; at each the longest stop. Returns (text to show, stop or None)."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def stream(pieces, stops, include):
    """Feed the pieces. Checks at every moment that all that could be shown is, and nothing else."""
    checker, shown = StopStrings(stops, include), ""
    seen = ""
    for piece in pieces:
        told = checker.completes(piece)
        before = checker.matched
        shown += checker.feed(piece)
        assert told == (before is None and checker.matched is not None), "completes() foretells feed()"
        seen += piece
        expected, stop = oracle(seen, stops, include)
        assert checker.matched == stop, f"after {seen!r} the stop is {stop!r}, not {checker.matched!r}"
        if stop is not None or include:
            assert shown == expected
        else:
            held = [n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])]
            assert shown == seen[: len(seen) - max(held, default=0)], "what may be a stop is held back, no more"
    shown += checker.finish()
    assert shown == oracle(seen, stops, include)[0]
    assert checker.finish() == ""
    return shown, checker.matched


FIXED = [
    # pieces, stops, text without the stop, matched
    (["Hello", " wor", "ld! B", "ye"], ["! By"], "Hello world", "! By"),
    (["abcdef"], ["cdef", "bc"], "a", "bc"),  # completed first wins, not begun first
    (["xab", "c"], ["ab", "xabc"], "x", "ab"),
    (["xabc"], ["bc", "abc", "c"], "x", "abc"),  # completed together: the longest
    (["aab", "aac"], ["aac"], "aab", "aac"),
    (["aaa", "ab"], ["aab"], "aa", "aab"),  # restarts inside itself
    (["STO"], ["STOP"], "STO", None),
    (["a\n", "\n", "b"], ["\n\n"], "a", "\n\n"),
    (["stop"], ["stop"], "", "stop"),
    (["你", "好。再", "见"], ["。再见"], "你好", "。再见"),
    (["abc"], [], "abc", None),
    (["", "a", ""], ["b"], "a", None),
]


def check_fixed():
    for pieces, stops, text, matched in FIXED:
        assert stream(pieces, stops, False) == (text, matched)
        assert stream(pieces, stops, True) == (text + (matched or ""), matched)


def test_fixed_cases():
    check_fixed()


@st.composite
def splits(draw):
    alphabet = draw(st.sampled_from(("ab", "abc", "a好\U0001f600", "\n ;")))
    stops = draw(st.lists(st.text(alphabet, min_size=1, max_size=5), min_size=0, max_size=4))
    pieces = draw(st.lists(st.text(alphabet, max_size=4), max_size=10))
    return pieces, stops


@settings(max_examples=500, deadline=None)
@given(splits(), st.booleans())
def test_any_text_any_split_any_stops(case, include):
    stream(*case, include)


@settings(max_examples=200, deadline=None)
@given(splits(), st.integers(0, 10), st.booleans())
def test_stops_do_not_count_before_they_are_enabled(case, start, include):
    """A stop that is completed while disabled is plain text; one that is completed later may begin before."""
    pieces, stops = case
    checker, shown = StopStrings(stops, include), ""
    for i, piece in enumerate(pieces):
        shown += checker.feed(piece, enabled=i >= start)
    shown += checker.finish()
    text, free = "".join(pieces), len("".join(pieces[:start]))
    for end in range(free + 1, len(text) + 1):
        if found := [s for s in stops if text[:end].endswith(s)]:
            stop = max(found, key=len)
            assert (shown, checker.matched) == (text[:end] if include else text[: end - len(stop)], stop)
            return
    assert (shown, checker.matched) == (text, None)


@given(st.text("ab", max_size=12))
def test_border_table(s):
    for i in range(len(s)):
        p = s[: i + 1]
        assert border_table(s)[i] == max(n for n in range(i + 1) if p[:n] == p[len(p) - n :])


def test_cost_does_not_depend_on_the_length_of_a_stop():
    """One step of a counter a character, amortised: also for a stop that nearly matches all the time."""
    stop, steps = "a" * 5000 + "b", 0

    class Counted(str):
        def __getitem__(self, i):
            nonlocal steps
            steps += 1
            return str.__getitem__(self, i)

    checker = StopStrings([stop])
    checker.stop = (Counted(stop),)
    for _ in range(4000):
        checker.feed("aaac")
    assert steps < 4 * 16000


# 2. Reasons to finish.


def finished(output, eos=(2,), max_tokens=100, stop_string=None, **params):
    params = SamplingParams(**{"max_tokens": max_tokens} | params)
    request = Request("r", [5], params, 0, frozenset(eos), max_tokens, output_token_ids=list(output))
    return check_finish(request, stop_string)


def test_finish_reasons_and_their_order():
    assert finished([9]) is None
    assert finished([9, 2]) == ("stop", None)
    assert finished([9, 2], ignore_eos=True) is None
    assert finished([9, 7], stop_token_ids=(7,)) == ("stop", 7)
    assert finished([9, 2], stop_token_ids=(2,)) == ("stop", None), "EOS comes first"
    assert finished([9, 2], stop_token_ids=(2,), ignore_eos=True) == ("stop", 2)
    assert finished([9], stop_string="x") == ("stop", "x")
    assert finished([9, 7], stop_token_ids=(7,), stop_string="x") == ("stop", 7)
    assert finished([9, 9], max_tokens=2) == ("length", None)
    assert finished([9, 2], max_tokens=2) == ("stop", None), "a stop at the limit is a stop"
    assert finished([9, 9], max_tokens=2, stop_string="x") == ("stop", "x")


def test_min_tokens_comes_before_every_stop_but_not_the_limit():
    for n in (1, 2, 3):
        for last, params in ((2, {}), (7, {"stop_token_ids": (7,)}), (9, {"stop_string": "x"})):
            assert finished([9] * (n - 1) + [last], min_tokens=3, **params) is None
    assert finished([9, 9, 9, 2], min_tokens=3) == ("stop", None)
    assert finished([9, 9, 9], min_tokens=3, max_tokens=3) == ("length", None)


# 3. The output processor: tokens of real tokenizers, deltas, text, reasons.


def drive(codec: Codec, prompt, output, eos=(), max_tokens=1000, **params):
    """Push until finished; the deltas are exactly the text at every step."""
    request = Request("r", list(prompt), SamplingParams(max_tokens=max_tokens, **params), 0, frozenset(eos), max_tokens)
    processor, deltas = OutputProcessor(codec, request), []
    for n, token in enumerate(output, 1):
        deltas.append(processor.push(token))
        assert request.output_token_ids == list(output[:n])
        assert "".join(deltas) == processor.text
        if request.finished:
            break
    text = processor.text
    assert processor.finish() == "" or not request.finished, "the last delta left something behind"
    return (processor.text if not request.finished else text), request


TEXT = "One, two;\nthree. 你好，世界 👩‍👩‍👧 end\n\nUser: more"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_stop_in_every_family(name):
    """Each substring of a text as a stop: text to the character, and not one token more than needed."""
    codec = FAMILIES[name]
    prompt, output = codec.encode("Count"), codec.continuation("Count", TEXT)
    full, request = drive(codec, prompt, output)
    assert request.finish_reason is None
    for start in range(0, len(full), 3):
        for size in (1, 2, 5):
            stop = full[start : start + size]
            for include in (False, True):
                text, request = drive(codec, prompt, output, stop=(stop,), include_stop_str_in_output=include)
                assert (text, request.stop_reason) == oracle(full, [stop], include)
                assert request.finish_reason == "stop"
                # The stop is seen with the first token whose text completes it.
                used = len(request.output_token_ids)
                need = next(
                    n
                    for n in range(1, len(output) + 1)
                    if stop in codec.text_after(prompt, output[:n], keep_broken=False)
                )
                assert used == need


def check_processor():
    codec = FAMILIES["byte level"]
    ids = codec.encode("a bc d")
    eos = codec.special("<eos>")
    run = lambda output, **p: drive(codec, codec.encode("x"), output, eos=(eos,), **p)
    text, r = run([*ids, eos, *ids])
    assert (text, r.finish_reason, r.stop_reason) == ("a bc d", "stop", None)
    assert r.output_token_ids == [*ids, eos], "EOS is a token, not text"
    text, r = run([*ids, eos, *ids], ignore_eos=True)
    assert (text, r.finish_reason) == ("a bc da bc d", None)
    text, r = run([*ids, eos, *ids], ignore_eos=True, skip_special_tokens=False)
    assert text == "a bc d<eos>a bc d"
    text, r = run([*ids, eos], skip_special_tokens=False)
    assert text == "a bc d", "the token that ends the text is not text even when special tokens are"
    text, r = run([*ids, eos], skip_special_tokens=False, include_stop_str_in_output=True)
    assert text == "a bc d<eos>"
    text, r = run(ids, stop_token_ids=(ids[-1],))
    assert (text, r.stop_reason) == (codec.decode(ids[:-1]), ids[-1])
    text, r = run(ids, stop_token_ids=(ids[-1],), include_stop_str_in_output=True)
    assert (text, r.stop_reason) == ("a bc d", ids[-1])
    text, r = run(ids, max_tokens=len(ids))
    assert (text, r.finish_reason, r.stop_reason) == ("a bc d", "length", None)
    text, r = run(ids, max_tokens=len(ids), stop=("d",))
    assert (text, r.finish_reason, r.stop_reason) == ("a bc ", "stop", "d")
    text, r = run(ids, max_tokens=len(ids), stop=("dx", " dy"))
    assert (text, r.finish_reason) == ("a bc d", "length"), "held-back text is released at the end"
    text, r = run([*ids, eos], stop=("dx", " dy"))
    assert (text, r.finish_reason) == ("a bc d", "stop")
    broken = codec.encode("你")[:1] if len(codec.encode("你")) > 1 else codec.encode("\u1000")[:1]
    text, r = run([*ids, *broken], max_tokens=len(ids) + 1)
    assert text == "a bc d\ufffd", "a character that is never finished is shown as decode() shows it"


def test_processor_cases():
    check_processor()


@pytest.mark.parametrize("name", FAMILIES)
def test_min_tokens_lets_early_stops_pass(name):
    codec = FAMILIES[name]
    prompt, output = codec.encode("Count"), codec.continuation("Count", "a b a b a b a b")
    text, request = drive(codec, prompt, output, stop=("a",))
    assert request.stop_reason == "a"
    assert "a" not in text
    for least in range(1, len(output)):
        text, request = drive(codec, prompt, output, stop=("a",), min_tokens=least)
        if request.finished:
            assert len(request.output_token_ids) > least
            assert codec.text_after(prompt, request.output_token_ids, keep_broken=False) == text + "a"
        else:
            later = codec.text_after(prompt, output)[len(codec.text_after(prompt, output[:least])) :]
            assert "a" not in later


def test_decoded_tokens_of_logprobs():
    codec = FAMILIES["byte level"]
    a, b = codec.encode("a")[0], codec.encode("b")[0]
    request = Request("r", [a], SamplingParams(logprobs=1), 0, max_tokens=5)
    processor = OutputProcessor(codec, request)
    request.logprobs.append({a: TokenLogprob(a, -0.5, 1), b: TokenLogprob(b, -1.0, 2)})
    processor.push(a)
    assert [entry.decoded_token for entry in request.logprobs[0].values()] == ["a", "b"]
    processor.push(b)  # without an entry of its own: nothing to name
    assert len(request.logprobs) == 1


def test_a_learners_detokenizer_is_used():
    class Upper(IncrementalDetokenizer):
        def append(self, token_ids):
            return super().append(token_ids).upper()

    codec = FAMILIES["byte level"]
    request = Request("r", codec.encode("x"), SamplingParams(), 0, max_tokens=9)
    processor = OutputProcessor(codec, request, Upper)
    assert "".join(processor.push(t) for t in codec.encode("ab c")) == "AB C"


# 4. Mutants.


class StopOneCharacterLate(StopStrings):
    def feed(self, text, enabled=True):
        late, self._late = getattr(self, "_late", "") + text[:-1], text[-1:]
        return super().feed(late, enabled)


class LongestInsteadOfEarliest(StopStrings):
    def feed(self, text, enabled=True):
        self._all = getattr(self, "_all", "") + text
        found = [s for s in self.stop if s in self._all]
        if found and self.matched is None:
            self.matched = max(found, key=len)
            return self._held + text[: text.find(self.matched)]
        return super().feed(text, False) if self.matched is None else ""


class NothingHeldBack(StopStrings):
    def feed(self, text, enabled=True):
        return super().feed(text, enabled) + self.finish()


class HeldTextNotReleased(StopStrings):
    def finish(self):
        return ""


class ShortestOfTwo(StopStrings):
    def _advance(self, character):
        return [min(done, key=len)] if (done := super()._advance(character)) else []


class RestartsFromNothing(StopStrings):
    """A counter that falls back to 0 on a mismatch: misses "aab" in "aaab"."""

    def __init__(self, stop, include_stop=False):
        super().__init__(stop, include_stop)
        self._tables = [[0] * len(s) for s in self.stop]


@pytest.mark.parametrize(
    "mutant",
    [
        StopOneCharacterLate, LongestInsteadOfEarliest, NothingHeldBack, HeldTextNotReleased, ShortestOfTwo,
        RestartsFromNothing,
    ],
)  # fmt: skip
def test_stop_mutants_are_caught(monkeypatch, mutant):
    monkeypatch.setitem(globals(), "StopStrings", mutant)
    with pytest.raises(AssertionError):
        check_fixed()


def without_the_token(request, stop_string=None):
    """Stop tokens end generation like a length limit: their text is shown."""
    ends = check_finish(request, stop_string)
    return ("length", ends[1]) if ends else None


PROCESSOR_MUTANTS = {
    "stop token shown": ("check_finish", without_the_token),
    "held text dropped at the end": ("StopStrings", HeldTextNotReleased),
    "stop found one character late": ("StopStrings", StopOneCharacterLate),
}


@pytest.mark.parametrize("name", PROCESSOR_MUTANTS)
def test_processor_mutants_are_caught(monkeypatch, name):
    monkeypatch.setattr(minillm.output, *PROCESSOR_MUTANTS[name])
    with pytest.raises(AssertionError):
        check_processor()


class Plain:
    """Stop strings as a learner writes them: no `enabled`, no `completes`."""

    def __init__(self, stop, include_stop):
        self.inner = StopStrings(stop, include_stop)

    @property
    def matched(self):
        return self.inner.matched

    def feed(self, text):
        return self.inner.feed(text)

    def finish(self):
        return self.inner.finish()


@pytest.mark.parametrize("params", [{}, {"min_tokens": 9}, {"stop": ("Paris",)}, {"stop": ("ital of France", "zzz")}])
def test_a_learners_stop_strings_take_the_place_of_the_engines(embedded_folder, params):
    from minillm import LLM, SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=24, **params)
    engine = LLM(embedded_folder, dtype="float32", max_model_len=128, threads=1)
    want = engine.generate(["The capital of France is"], asked, use_tqdm=False)[0].outputs[0]
    engine.engine.stops = Plain
    got = engine.generate(["The capital of France is"], asked, use_tqdm=False)[0].outputs[0]
    assert (got.text, got.finish_reason, got.stop_reason) == (want.text, want.finish_reason, want.stop_reason)
