"""`minillm chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from minillm.commands import add_model_options, add_sampling_options, command, load_llm, sampling_params
from minillm.errors import MinillmError


def add_parser(sub: Any) -> None:
    parser = command(
        sub, "chat", "Talk to a model; an empty line or Ctrl-D ends it.", "minillm chat --temperature 0.7 --seed 1"
    )
    parser.add_argument("--system", default=None, metavar="TEXT", help="system message")
    add_sampling_options(parser, max_tokens=512)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    llm = load_llm(args)
    tokenizer = llm.get_tokenizer()
    history: list[dict[str, str]] = [{"role": "system", "content": args.system}] if args.system else []
    while (line := _read(args.json)) is not None:
        history.append({"role": "user", "content": line})
        ids = tokenizer.apply_chat_template(history)
        limit = llm.engine.max_model_len
        if len(ids) >= limit:
            print(
                f"The conversation has {len(ids)} tokens and the context holds {limit}. Start a new one.",
                file=sys.stderr,
            )
            return 0
        pieces = []
        for delta in llm.stream(ids, params):
            pieces.append(delta)
            if not args.json:
                print(delta, end="", flush=True)
        answer = "".join(pieces)
        history.append({"role": "assistant", "content": answer})
        print(json.dumps({"role": "assistant", "content": answer}) if args.json else "", flush=True)
    return 0


def _read(quiet: bool) -> str | None:
    """The next line of the user; None at an empty line or the end of the input."""
    if sys.stdin is None:  # closed
        return None
    try:
        line = input("> " if sys.stdin.isatty() and not quiet else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError:
        raise MinillmError("standard input is not text in UTF-8") from None
    return line or None
