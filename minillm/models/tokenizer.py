"""Text to token ids and back, with the model's own `tokenizer.json` and chat template. Lesson 03 uses it.

The `tokenizers` library does the work. It starts ten times faster than the full transformers tokenizer,
which is used only for folders that have no `tokenizer.json` (older Llama folders with `tokenizer.model`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError

Message = Mapping[str, Any]

LONG = 4096  # characters from which a batch of one is the better way to encode


class Tokenizer:
    """Tokenizer of one model folder. Token ids are plain ints in [0, vocab_size)."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.backend = _load_backend(self.folder)
        self.settings = _read_json(self.folder / "tokenizer_config.json")
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        added = self.backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        eos = _read_json(self.folder / "generation_config.json").get("eos_token_id")
        if eos is None:
            eos = _read_json(self.folder / "config.json").get("eos_token_id")
        ids = set()
        for t in eos if isinstance(eos, list) else [] if eos is None else [eos]:
            if not isinstance(t, int) or isinstance(t, bool):
                raise MinillmError(f"{self.folder.name}: eos_token_id must be whole numbers, got {eos!r:.80}")
            ids.add(t)
        # Chat models end a turn with the tokenizer's eos token, which is not always the one in config.json.
        name = _token_text(self.settings.get("eos_token"))
        if name is not None and (own := self.backend.token_to_id(name)) is not None:
            ids.add(own)
        self.eos_token_ids: frozenset[int] = frozenset(ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise MinillmError(f"expected text, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise MinillmError("the text holds half of a surrogate pair; send valid Unicode") from None
        if len(text) < LONG:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        # Without offsets, which nobody reads here. To make and free them, it would hold up every other thread.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str:
        """The token's own spelling (`Ġthe` in byte-level vocabularies); empty for an id without a token."""
        return self.backend.id_to_token(token_id) or ""

    @functools.cached_property
    def chat_template(self) -> str | None:
        file = self.folder / "chat_template.jinja"
        try:
            template = file.read_text(encoding="utf-8") if file.is_file() else self.settings.get("chat_template")
            if isinstance(template, list):  # several named templates: the default one
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
        except (OSError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise MinillmError(f"{self.folder.name}: the chat template cannot be read ({error!r:.80})") from None
        if not isinstance(template, str | None):
            raise MinillmError(f"{self.folder.name}: the chat template must be text, got {template!r:.80}")
        return template

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text that the model's chat template makes of `messages` ([{"role": ..., "content": ...}, ...])."""
        if not self.chat_template:
            raise MinillmError(f"{self.folder.name} has no chat template; send a plain prompt to generate() instead")
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
            raise MinillmError("messages must be a non-empty list of {'role': ..., 'content': ...}")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise MinillmError(f"messages[{i}] must have a 'role' (text) and a 'content', got {message!r:.80}")
        from transformers.utils.chat_template_utils import render_jinja_template

        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        special: dict[str, Any] = {key: _token_text(self.settings.get(key)) or "" for key in names}
        try:
            rendered: Any = render_jinja_template(
                **{"add_generation_prompt": add_generation_prompt, **special, **variables},
                conversations=[[dict(m) for m in messages]],
                chat_template=self.chat_template,
            )
        except Exception as error:  # a template is code of its own: what it cannot do with these messages has any type
            raise MinillmError(f"the chat template refused these messages: {error}") from None
        return str(rendered[0][0])  # (texts, generation spans): one text for one conversation

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The token ids of a rendered chat. The template writes its own special tokens, so none are added."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)


def _load_backend(folder: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # tokenizers raises a bare Exception
            raise MinillmError(f"{file} cannot be read ({error}); fetch the model again") from None
        backend.no_padding()
        backend.no_truncation()
        return backend
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, use_fast=True).backend_tokenizer
    except Exception as error:  # of any type: transformers guesses what kind of folder this is
        raise MinillmError(
            f"{folder} has no tokenizer.json, and transformers cannot make one ({str(error).strip()[:120]})"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MinillmError(f"{path} is not valid JSON ({error}); fetch the model again") from None
    if not isinstance(found, dict):
        raise MinillmError(f"{path} does not hold a JSON object; fetch the model again")
    return found


def _token_text(value: Any) -> str | None:
    """`"<s>"` or `{"content": "<s>", ...}` -> `"<s>"`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
