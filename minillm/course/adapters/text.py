"""Exercise 03's detokenizer and stop strings, as the engine calls them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from minillm.course.answers import Answers
from minillm.errors import MinillmError
from minillm.models.detokenizer import WINDOW, TextCodec


def detokenizer(answers: Answers) -> Callable[[TextCodec, Sequence[int], bool], DetokenizerPart]:
    """What `parts["detokenizer"]` takes, around 03.7's Detokenizer(decode)."""
    kind = answers.take("03.7", 1, append=1, finish=0)
    return lambda tokenizer, prompt, skip_special: DetokenizerPart(kind, tokenizer, prompt, skip_special)


class DetokenizerPart:
    """Leaves out special tokens, and decodes behind the tokens before: many tokenizers drop a text's first space.

    Exact for byte-level vocabularies, which the exercise is about. Where a character is spelled in byte tokens (Llama
    2), a run of them that turns out bad may show otherwise than the engine's own shows it.
    """

    def __init__(self, kind: Any, tokenizer: TextCodec, prompt: Sequence[int], skip_special: bool):
        self.tokenizer = tokenizer
        self.hidden = tokenizer.special_ids if skip_special else frozenset()
        self.tokens = [t for t in prompt[-4 * WINDOW :] if self._visible(t)]
        self.mine = kind(self._decode)

    def append(self, token_ids: Iterable[int]) -> str:
        out = ""
        for token in filter(self._visible, token_ids):
            self.tokens.append(token)
            out += _text("Detokenizer.append", self.mine.append(token))
        return out

    def finish(self) -> str:
        return _text("Detokenizer.finish", self.mine.finish())

    def _visible(self, token: int) -> bool:
        return token not in self.hidden and bool(self.tokenizer.id_to_token(token))

    def _decode(self, token_ids: list[int]) -> str:
        """The text that these tokens add. They are the last ones; whatever else is asked for is decoded alone."""
        ids = list(token_ids)
        before = self.tokens[-len(ids) - WINDOW : -len(ids)] if ids and self.tokens[-len(ids) :] == ids else []
        text, old = self.tokenizer.decode(before + ids, False), self.tokenizer.decode(before, False) if before else ""
        same = next((i for i, (x, y) in enumerate(zip(text, old, strict=False)) if x != y), min(len(text), len(old)))
        return text[same:]


def stops(answers: Answers) -> Callable[[Sequence[str], bool], StopsPart]:
    """What `parts["stops"]` takes, around 03.8's StopStrings(stop, include_stop)."""
    kind = answers.take("03.8", 2, feed=1, finish=0)
    return lambda stop, include: StopsPart(kind, stop, include)


class StopsPart:
    """Without stop strings, and while none counts yet (min_tokens), text passes by: the exercise has neither.

    So of a stop string that begins in the first min_tokens tokens, the learner's class does not see the beginning.
    """

    name = "StopStrings"

    def __init__(self, kind: Any, stop: Sequence[str], include_stop: bool):
        self.stop = tuple(stop)
        self.mine = kind(list(stop), include_stop) if stop else None
        self._fed = False

    @property
    def matched(self) -> str | None:
        matched: str | None = self.mine.matched if self.mine is not None and self._fed else None
        if matched is not None and matched not in self.stop:
            raise MinillmError(
                f"parts: {self.name}.matched is {matched!r:.80}; expected None or one of {self.stop!r:.80}"
            )
        return matched

    def feed(self, text: str, enabled: bool = True) -> str:
        if self.mine is not None and not enabled:
            return "" if self.matched is not None else self.finish() + text
        return self._feed(text)

    def _feed(self, text: str, *enabled: bool) -> str:
        if self.mine is None:
            return text
        self._fed = True
        return _text(f"{self.name}.feed", self.mine.feed(text, *enabled))

    def completes(self, text: str) -> bool:
        if self.mine is None or not text or self.matched is not None:
            return False
        trial = copy.deepcopy(self.mine)
        trial.feed(text)
        return trial.matched is not None

    def finish(self) -> str:
        return _text(f"{self.name}.finish", self.mine.finish()) if self.mine is not None and self._fed else ""


def _text(what: str, given: Any) -> str:
    if not isinstance(given, str):
        raise MinillmError(f"parts: {what} must return text, got {given!r:.80}")
    return given
