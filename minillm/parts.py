"""A learner's own parts of an engine: made, and judged while they run. Lessons 02 to 06 mount them.

What a part returns goes on into the engine, where a wrong shape would fail far from its cause, or not at all. So each
answer is judged where it comes back, and the error names the part. What a part itself raises goes through untouched.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from torch import Tensor

from minillm.attention.protocol import Batch
from minillm.engine_config import EngineConfig
from minillm.errors import MinillmError
from minillm.sampler import NO_TOKEN

# name -> what it is called with; the sampler and the policies are objects, the others classes.
PARTS = (
    "sampler", "kv_cache", "detokenizer", "allocator", "attention", "scheduler", "policy", "prefix_cache", "eviction",
    "stops",
)  # fmt: skip
OBJECTS = {"sampler": ("sample",), "policy": ("key", "victim", "admit"), "eviction": ("key",)}  # and their methods


def check_parts(parts: Any, config: EngineConfig) -> dict[str, Any]:
    """The parts that were given, if this engine would call each of them. Raises MinillmError otherwise."""
    if not isinstance(parts or {}, Mapping):
        raise MinillmError(f"parts must be a dict of {', '.join(PARTS)}, got {parts!r:.80}")
    parts = {name: part for name, part in (parts or {}).items() if part is not None}
    if unknown := [name for name in parts if name not in PARTS]:
        raise MinillmError(f"parts: {unknown[0]!r} is not a part of this engine; it has {', '.join(PARTS)}")
    paged, prefix = config.kv_cache == "paged", config.enable_prefix_caching
    read = {  # part -> whether this engine calls it, and what would
        "kv_cache": (config.kv_cache == "contiguous", "kv_cache='contiguous'"),
        "allocator": (paged, "kv_cache='paged'"), "attention": (paged, "kv_cache='paged'"),
        "scheduler": (config.continuous, "batching='continuous'"),
        "policy": (config.continuous, "batching='continuous'"),
        "prefix_cache": (prefix, "enable_prefix_caching=True"), "eviction": (prefix, "enable_prefix_caching=True"),
    }  # fmt: skip
    for name, part in parts.items():
        for method in OBJECTS.get(name, ()):
            if isinstance(part, type) or not callable(getattr(part, method, None)):
                needed = ", ".join(OBJECTS[name])
                raise MinillmError(f"parts: the {name} must be an object with {needed}, got {part!r:.80}")
        if name not in OBJECTS and not callable(part):
            raise MinillmError(f"parts: {name} must be a class, got {part!r:.80}")
        if name == "attention" and config.batch_invariant:
            raise MinillmError("parts: batch_invariant=True has an attention of its own; give one of the two")
        if name == "attention" and config.kv_disk_path is not None:
            raise MinillmError(
                "parts: attention writes KV that only it can read, and kv_disk_path keeps KV for later engines; give "
                "one of the two"
            )
        if name in read and not read[name][0]:
            raise MinillmError(
                f"parts: {name} belongs to {read[name][1]}, and this engine has kv_cache={config.kv_cache!r}, "
                f"enable_prefix_caching={prefix}: it would never call it"
            )
    for name, option, default in (("prefix_cache", "prefix_cache", "radix"), ("policy", "scheduling_policy", "fcfs")):
        if name in parts and (value := getattr(config, option)) != default:
            raise MinillmError(f"parts: {name} takes the place of {option}={value!r}; give one of the two")
    return parts


def make_part(name: str, make: Callable[..., Any], what: str, *arguments: Any) -> Any:
    """make(*arguments); a signature that does not take them is refused in words. what: the arguments, in words."""
    try:
        inspect.signature(make).bind(*arguments)
    except TypeError as error:
        raise MinillmError(f"parts: {name} is called with {what}, and {make!r:.80} cannot be: {error}") from None
    except ValueError:  # some built-in callables have no signature
        pass
    return make(*arguments)


def check_scheduler(scheduler: Any) -> None:
    """Raise MinillmError if it lacks what every step calls."""
    for name in ("add", "schedule", "finish"):
        if not callable(getattr(scheduler, name, None)):
            raise MinillmError(f"parts: the scheduler needs a method {name}, got {scheduler!r:.80}")
    if not isinstance(waiting := getattr(scheduler, "num_waiting", None), int) or isinstance(waiting, bool):
        raise MinillmError(f"parts: the scheduler's num_waiting must be a number (a property), got {waiting!r:.80}")
    if not isinstance(running := getattr(scheduler, "running", None), Sized):
        raise MinillmError(f"parts: the scheduler's running must be a list of requests, got {running!r:.80}")


class OwnAttention:
    """A learner's attention backend. It has `rope_write` exactly if the part has it."""

    def __init__(self, part: Any, kv_heads: int):
        rotates = hasattr(part, "rope_write")
        for name in ("plan", "rope_write" if rotates else "write", "forward"):
            if not callable(getattr(part, name, None)):
                raise MinillmError(f"parts: attention needs a method {name}, got {part!r:.80}")
        self.part, self.kv_heads = part, kv_heads
        if rotates:
            self.rope_write = self._rope_write

    def plan(self, batch: Batch) -> Any:
        return self.part.plan(batch)

    def write(self, layer: int, k: Tensor, v: Tensor, plan: Any) -> None:
        self.part.write(layer, k, v, plan)

    def _rope_write(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, plan: Any) -> Tensor:
        q = self.part.rope_write(layer, qkv, cos, sin, positions, plan)
        if _kind(q) != (wanted := _kind(qkv[:, : qkv.shape[1] - 2 * self.kv_heads])):
            raise MinillmError(f"parts: attention's rope_write must return q, {wanted}, got {_kind(q)}")
        return q

    def forward(self, layer: int, q: Tensor, plan: Any) -> Tensor:
        out = self.part.forward(layer, q, plan)
        if _kind(out) != _kind(q):
            raise MinillmError(f"parts: attention's forward must return {_kind(q)} as q is, got {_kind(out)}")
        return out


def _kind(x: Any) -> str:
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def drawn(result: Any, shape: Sequence[int]) -> tuple[list[int], list[Any]]:
    """What a sampler returned, judged: it may be a learner's. shape is [requests, vocabulary]."""
    count, vocab = shape
    try:
        tokens, logprobs = result
        tokens, logprobs = [operator.index(t) for t in tokens], list(logprobs)
    except (TypeError, ValueError):
        raise MinillmError(
            f"the sampler must return (token ids, logprobs), two lists with an entry a request, got {result!r:.120}"
        ) from None
    if not len(tokens) == len(logprobs) == count:
        raise MinillmError(
            f"the sampler got {count} requests, but returned {len(tokens)} tokens and {len(logprobs)} logprobs"
        )
    if wrong := [t for t in tokens if t != NO_TOKEN and not 0 <= t < vocab]:
        raise MinillmError(f"the sampler drew {wrong[0]}; token ids are whole numbers from 0 to {vocab - 1}")
    return tokens, logprobs
