"""`minillm serve`: an OpenAI-style server. Flags are named as vLLM names them where they mean the same."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from minillm.commands import add_use_option, command
from minillm.server.config import ServerConfig

# flag -> what it sets in ServerConfig or EngineConfig under another name than its own.
SERVER = (
    "host", "port", "served_model_name", "api_key", "admin_key", "tenants", "max_queued_requests", "max_queued_tokens",
    "request_timeout_s", "body_timeout_s", "max_body_bytes", "grace_s", "stall_s", "max_connections", "trace_file",
    "otlp_traces_endpoint", "idle_timeout_s", "send_buffer_bytes", "role", "split", "prefill", "kv_address",
    "kv_lease_s",
)  # fmt: skip
ENGINE = (
    "dtype", "device", "quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
    "kv_cache_dtype", "attention_backend", "num_kv_blocks", "kv_cache_memory_bytes", "engines_on_device",
    "seed", "threads", "compile", "enforce_eager", "batch_invariant", "enable_prefix_caching",
    "enable_chunked_prefill", "scheduling_policy", "kv_host_bytes", "kv_disk_bytes",
    "kv_disk_path", "priority_ageing_s", "preemption_mode", "tensor_parallel_size", "pipeline_parallel_size",
)  # fmt: skip


def add_parser(sub: Any) -> None:
    parser = command(
        sub, "serve", "Serve a model to OpenAI's clients.",
        "minillm serve --port 8000 --api-key sk-local-1234, then any OpenAI client at http://127.0.0.1:8000/v1",
    )  # fmt: skip
    on, ours, arg = argparse.BooleanOptionalAction, ServerConfig(), parser.add_argument
    arg(
        "--model", default="smollm2-135m", help="embedded model, Hugging Face folder or hub name (default: %(default)s)"
    )
    arg("--served-model-name", help="the name that clients use (default: as --model)")
    arg("--host", default=ours.host, help="where to listen; 0.0.0.0 is everywhere (default: %(default)s)")
    arg("--port", type=int, default=ours.port, help="0 takes a free one (default: %(default)s)")
    add_use_option(parser)

    who = parser.add_argument_group("who is let in")
    arg = who.add_argument
    arg("--api-key", action="append", default=[], help="let in who has it; may be given more than once (default: all; "
        "or MINILLM_API_KEY)")  # fmt: skip
    arg("--admin-key", help="opens /drain (default: MINILLM_ADMIN_KEY)")
    arg("--tenants", metavar="FILE", help="keys, classes and quotas of tenants, in TOML: see docs/tenants.md")
    arg(
        "--max-queued-requests",
        type=int,
        default=ours.max_queued_requests,
        help="beyond it: 429 (default: %(default)s)",
    )
    arg("--max-queued-tokens", type=int, default=ours.max_queued_tokens, help="of those that wait; beyond it: 429 "
        "(default: %(default)s)")  # fmt: skip
    arg("--max-connections", type=int, help="beyond it: 503 (default: 1024, or what the limit of open files leaves)")
    arg("--send-buffer-bytes", type=int, default=ours.send_buffer_bytes, help="what a reader that "
        "stalls may fill (default: %(default)s)")  # fmt: skip
    arg("--max-body-bytes", type=int, help="beyond it: 413 (default: by the context, at most 1 MiB)")

    time = parser.add_argument_group("time, in seconds")
    arg = time.add_argument
    arg(
        "--request-timeout-s",
        type=float,
        default=ours.request_timeout_s,
        help="for a whole answer (default: %(default)g)",
    )
    arg("--body-timeout-s", type=float, default=ours.body_timeout_s, help="for a body to arrive (default: %(default)g)")
    arg("--grace-s", type=float, default=ours.grace_s, help="for running streams when it ends (default: %(default)g)")
    arg(
        "--idle-timeout-s",
        type=float,
        default=ours.idle_timeout_s,
        help="for a connection without a request (default: %(default)g)",
    )
    arg(
        "--stall-s", type=float, default=ours.stall_s, help="without a step until /ready says no (default: %(default)g)"
    )

    engine = parser.add_argument_group("engine")
    arg = engine.add_argument
    arg("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    arg("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    arg("--quantization", help="of the weights: int8 or int4 (default: none)")
    arg("--max-model-len", type=int, help="most tokens of prompt and answer (default: the model's limit)")
    arg("--max-num-seqs", type=int, default=32, help="most sequences that run together (default: %(default)s)")
    arg("--max-num-batched-tokens", type=int, default=512, help="most tokens of a step (default: %(default)s)")
    arg("--kv-memory", "--kv-cache-memory-bytes", dest="kv_cache_memory_bytes", type=size, metavar="SIZE",
        help="for KV, as 512M or 2G (default: max-num-seqs longest sequences, up to half of what is free, "
        "and on a CPU up to 4G)")  # fmt: skip
    arg("--num-kv-blocks", type=int, help="the same in blocks")
    arg("--engines-on-device", type=int, default=1, help=argparse.SUPPRESS)  # --split tells its prefill servers
    arg("--block-size", type=int, default=16, help="tokens of a KV block (default: %(default)s)")
    arg("--kv-cache-dtype", default="auto", help="auto, int8 or fp8 (default: %(default)s)")
    arg("--attention-backend", default="auto", help="auto, reference, torch or triton (default: %(default)s)")
    arg("--enable-prefix-caching", action=on, default=True, help="keep prompts' KV for those that begin alike")
    arg("--enable-chunked-prefill", action=on, default=True, help="compute prompts in parts, beside others' tokens")
    arg("--scheduling-policy", help="fcfs, priority or deadline (default: priority, or as a mounted part decides)")
    arg("--priority-ageing-s", type=float, default=10.0, help="waiting that makes up for one step of priority")
    arg("--preemption-mode", default="auto", help="auto, recompute or swap (default: %(default)s)")
    arg("--kv-host-bytes", type=size, default=0, metavar="SIZE", help="evicted KV in host memory (default: none)")
    arg("--kv-disk-bytes", type=size, default=0, metavar="SIZE", help="and on disk, in --kv-disk-path (default: none)")
    arg("--kv-disk-path", metavar="FOLDER")
    arg("--tensor-parallel-size", type=int, default=1, metavar="N", help="processes, or GPUs, that share each layer "
        "(default: %(default)s)")  # fmt: skip
    arg("--pipeline-parallel-size", type=int, default=1, metavar="S", help="stages of layers, one after the other "
        "(default: %(default)s)")  # fmt: skip
    arg("--compile", action="store_true", help="CPU: compile the operators between matrix products")
    arg("--enforce-eager", action="store_true", help="capture no CUDA graphs")
    arg("--batch-invariant", action="store_true", help="same logits in any company; slower")
    arg("--seed", type=int, default=0, help="of requests that bring none (default: %(default)s)")
    arg("--threads", type=int, help="CPU threads (default: torch's choice)")

    split = parser.add_argument_group("prefill and decode apart (docs/pd_split.md)")
    arg = split.add_argument
    arg("--split", metavar="NpMd", help="1p1d: start a prefill server as well, which computes prompts and ends with "
        "this one")  # fmt: skip
    arg("--role", default=ours.role, help="both, prefill or decode (default: %(default)s); the key that the servers of "
        "a split share is MINILLM_KV_KEY")  # fmt: skip
    arg("--prefill", type=lambda text: tuple(text.split(",")), default=(), metavar="ADDRESS,...", help="role decode: "
        "the prefill servers, by the kv addresses that they tell")  # fmt: skip
    arg("--kv-address", metavar="ADDRESS", help="role prefill: where to listen for decode servers, unix:@NAME or "
        "unix:/PATH (default: a free one)")  # fmt: skip
    arg("--kv-lease-s", type=float, default=ours.kv_lease_s, help="until a prompt is computed here after all "
        "(default: %(default)g)")  # fmt: skip

    watch = parser.add_argument_group("watching")
    arg = watch.add_argument
    arg("--trace-file", metavar="FILE", help="a JSON line for each request: where its time went, nothing of its text")
    arg("--otlp-traces-endpoint", metavar="URL", help="send the same spans to an OpenTelemetry collector")
    parser.set_defaults(run=run, default_of=parser.get_default)


def size(text: str) -> int:
    """ "512M", "2G" or a number of bytes; K, M, G, T are powers of 1024."""
    number, unit = text.strip().upper().removesuffix("B").removesuffix("I"), 1
    if number and number[-1] in "KMGT":
        number, unit = number[:-1], 1024 ** ("KMGT".index(number[-1]) + 1)
    try:
        value = float(number) * unit
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**60:
        raise argparse.ArgumentTypeError(f"expected a size such as 512M or 2G, got {text!r}")
    return int(value)


def run(args: argparse.Namespace) -> int:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        from minillm.errors import MinillmError

        raise MinillmError(f"serving needs {error.name}; install it with: pip install 'minillm[server]'") from None
    from minillm.server.command import main

    if not args.use:
        return main(args)
    from minillm.course.mount import in_words

    with in_words():
        return main(args)


def options(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ServerConfig's, EngineConfig's) options of a command line. Keys may come from the environment, where no list of
    processes shows them."""
    server = {name: getattr(args, name) for name in SERVER}
    if not args.api_key and args.tenants is None and os.environ.get("MINILLM_API_KEY"):
        server["api_key"] = [os.environ["MINILLM_API_KEY"]]
    server["api_key"] = tuple(server["api_key"])
    server["hash_salt"] = os.environ.get("MINILLM_HASH_SALT") or None
    server["admin_key"] = args.admin_key or os.environ.get("MINILLM_ADMIN_KEY") or None
    engine = {name: getattr(args, name) for name in ENGINE}
    return server, engine


def tell(args: argparse.Namespace, **facts: Any) -> None:
    """One line for people, or one JSON object a line."""
    if args.json:
        print(json.dumps(facts), flush=True)
    else:
        print(facts["text"], file=sys.stderr, flush=True)
