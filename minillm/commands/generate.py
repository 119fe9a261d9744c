"""`minillm generate`: one answer, printed as it is generated."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from minillm.commands import add_model_options, add_sampling_options, add_use_option, command, load_llm, sampling_params


def add_parser(sub: Any) -> None:
    parser = command(
        sub, "generate", "Answer one prompt.", 'minillm generate "What is the capital of France?" --max-tokens 16'
    )
    parser.add_argument("prompt", help="the question; '-' reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="complete the text as it stands, without the chat template")
    add_sampling_options(parser, max_tokens=128)
    add_model_options(parser)
    add_use_option(parser)
    parser.set_defaults(run=run, default_of=parser.get_default)


def read_input() -> str:
    """All of standard input, which may be closed or not text."""
    from minillm.errors import MinillmError

    try:
        return sys.stdin.read()
    except (AttributeError, UnicodeDecodeError, OSError):  # Python sets sys.stdin to None where it is closed
        raise MinillmError("standard input is closed or not text; give the prompt as an argument") from None


def mounted(args: argparse.Namespace) -> dict[str, Any]:
    """The learner's parts, and the options that they need. Says on stderr what is mounted."""
    from minillm.course.mount import load_all
    from minillm.errors import MinillmError

    mine = load_all(args.use)
    if mine.server:
        raise MinillmError(f"the {next(iter(mine.server))} is a part of the server: use it with minillm serve")
    print("\n".join(mine.lines()), file=sys.stderr)
    asked = {name: getattr(args, name, None) for name in mine.options}
    options = mine.config({name: value for name, value in asked.items() if value != args.default_of(name)})
    return options | {"parts": mine.parts}


def run(args: argparse.Namespace) -> int:
    if not args.use:
        return generate(args)
    from minillm.course.mount import in_words

    with in_words():
        return generate(args, **mounted(args))


def generate(args: argparse.Namespace, **options: Any) -> int:
    """options: of `LLM`, which take the place of the command line's."""
    started = time.perf_counter()
    prompt = read_input() if args.prompt == "-" else args.prompt
    params = sampling_params(args)
    llm = load_llm(args, **options)
    tokenizer = llm.get_tokenizer()
    if not args.raw and tokenizer.chat_template:
        text = tokenizer.render_chat([{"role": "user", "content": prompt}])
        prompt = {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
    if not args.json:
        for delta in llm.stream(prompt, params):
            print(delta, end="", flush=True)
        print()
        return 0
    loaded = time.perf_counter() - started
    (result,) = llm.generate([prompt], params, use_tqdm=False)
    (out,) = result.outputs
    seconds = result.metrics["e2e_latency"]
    print(
        json.dumps(
            {
                "text": out.text,
                "token_ids": out.token_ids,
                "prompt_tokens": len(result.prompt_token_ids),
                "finish_reason": out.finish_reason,
                "stop_reason": out.stop_reason,
                "seconds_to_load": loaded,
                "time_to_first_token": result.metrics["time_to_first_token"],
                "tokens_per_second": len(out.token_ids) / seconds,
            }
        )
    )
    return 0
