"""The subcommands of `minillm`, one file each: `add_parser(sub)` declares it, `run(args)` does it."""

from __future__ import annotations

import argparse
from typing import Any


def command(sub: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """A subcommand's parser with what all of them share: help, an example, `--json`."""
    parser = sub.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that loads a model."""
    parser.add_argument(
        "--model", default="smollm2-135m", help="embedded model, Hugging Face folder or hub name (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument(
        "--kv-cache",
        default="contiguous",
        help="contiguous, paged, or none to recompute everything (default: %(default)s)",
    )
    parser.add_argument(
        "--attention-backend", default="auto", help="of a paged cache: auto, reference, torch or triton (default: auto)"
    )
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block of a paged cache (default: 16)")
    parser.add_argument("--num-kv-blocks", type=int, default=None, help="blocks of a paged cache (default: by memory)")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", help="of a paged cache: auto, int8 or fp8 (default: %(default)s)"
    )
    parser.add_argument("--quantization", default=None, help="of the weights: int8 or int4 (default: none)")
    parser.add_argument("--enforce-eager", action="store_true", help="capture no CUDA graphs")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N",
        help="processes, or GPUs, that share each layer; needs --kv-cache paged (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--pipeline-parallel-size", type=int, default=1, metavar="S",
        help="stages of layers, one after the other; needs --kv-cache paged (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-model-len", type=int, default=None, help="most tokens of prompt and answer (default: the model's limit)"
    )
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's choice)")


def add_use_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--use", action="append", default=[], metavar="NOTEBOOK",
        help="run the code of an exercise and put your answers into the engine: exercises/06_paged_attention.ipynb, or "
        ".ipynb:06.2,06.5 for those answers only; may be given more than once",
    )  # fmt: skip


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """The options of `SamplingParams` that make sense on a command line."""
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, help="most tokens to generate (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus probability (default: %(default)s)")
    parser.add_argument(
        "--top-k", type=int, default=0, help="keep the k best tokens, 0 keeps all (default: %(default)s)"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="keep tokens this likely relative to the best (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="of the random draws; the same seed draws the same tokens (default: 0)"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be given more than once"
    )


def sampling_params(args: argparse.Namespace) -> Any:
    from minillm.request import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
    return SamplingParams(**{name: getattr(args, name) for name in names})


def load_llm(args: argparse.Namespace, **more: Any) -> Any:
    """more: options of `LLM` that take the place of the command line's."""
    from minillm.llm import LLM

    names = (
        "dtype", "device", "kv_cache", "attention_backend", "block_size", "num_kv_blocks", "kv_cache_dtype",
        "quantization", "enforce_eager", "max_model_len", "threads",
        "tensor_parallel_size", "pipeline_parallel_size",
    )  # fmt: skip
    return LLM(args.model, **({name: getattr(args, name) for name in names} | more))
