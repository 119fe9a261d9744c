"""Other engines on the same work: same weights, dtype, threads and token ids. None is needed by minillm or its tests.

The transformers library runs in this process. vLLM and llama.cpp pin a torch or a compiler of their own, so each runs
in the Python of its own environment: a worker from `peer_workers/`, started once, asked once a turn, stopped by SIGSTOP
between its turns, so that one side computes at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from minillm.bench.common import synchronize
from minillm.errors import MinillmError

IN_PROCESS = "transformers"
WORKERS = {"vllm": "vllm_worker.py", "llama.cpp": "llamacpp_worker.py"}
NAMES = (IN_PROCESS, *WORKERS)
PATIENCE = 900.0  # seconds for one answer: vLLM compiles for minutes when it loads


def named(text: str) -> dict[str, str]:
    """`transformers,vllm=/envs/vllm/bin/python` as {name: Python that runs it}. Raises MinillmError."""
    found: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, python = item.partition("=")
        if name not in NAMES:
            raise MinillmError(f"peer {name!r} is not known; use {', '.join(NAMES)}")
        if name == IN_PROCESS and python:
            raise MinillmError(f"{name} runs in this Python; leave out '={python}'")
        found[name] = python or sys.executable
    if not found:
        raise MinillmError(f"--peer names no peer; use {', '.join(NAMES)}")
    return found


def without_paths(text: str) -> str:
    """The same for a record, which names no folder of a machine: `transformers,vllm=PYTHON`."""
    return ",".join(item.partition("=")[0] + ("=PYTHON" if "=" in item else "") for item in text.split(","))


class TransformersPeer:
    """`transformers.generate` as a user would call it: SDPA attention, its default (dynamic) cache, greedy.

    A batch is padded on the left and runs until its longest member is done; each request keeps its own tokens.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str):
        try:
            import transformers
            from transformers import AutoModelForCausalLM, GenerationConfig
        except ImportError:
            raise MinillmError("the peer needs the transformers library: pip install transformers") from None
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(device).eval()
        self.config = GenerationConfig
        self.device = device
        self.about = {"version": transformers.__version__, "how": {"batching": "static", "attention": "sdpa"}}

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[list[int]]:
        """Exactly `new_tokens[i]` greedy tokens after prompt i."""
        width, most = max(map(len, prompts)), max(new_tokens)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        how = self.config(
            do_sample=False, max_new_tokens=most, min_new_tokens=most, eos_token_id=None, pad_token_id=0, use_cache=True
        )  # fmt: skip
        out = self.model.generate(ids, attention_mask=mask, generation_config=how)
        return [out[i, width : width + n].tolist() for i, n in enumerate(new_tokens)]

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> tuple[list[list[int]], float]:
        """The tokens, and the seconds they took."""
        synchronize(self.device)
        start = time.perf_counter()
        tokens = self.generate(prompts, new_tokens)
        synchronize(self.device)
        return tokens, time.perf_counter() - start

    @torch.inference_mode()
    def last_logits(self, prompt: Sequence[int]) -> torch.Tensor:
        """[V] in fp32: the scores of the token after the prompt."""
        return self.model(torch.tensor([list(prompt)], device=self.device)).logits[0, -1].float()

    def close(self) -> None:
        pass


class WorkerPeer:
    """A peer in a process of its own, in a process group of its own.

    name is for messages; python runs `script`; load is what the worker's engine needs (see peer_workers/protocol.py).
    `about["idle_cores"]` says how many cores it kept busy while nobody asked it anything, before it was ever stopped.
    """

    def __init__(self, name: str, python: str, script: Path, load: Mapping[str, Any]):
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the worker lives
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        environment["OMP_NUM_THREADS"] = str(load["threads"])
        try:
            self._process = subprocess.Popen(
                [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise MinillmError(f"peer {name}: {python} cannot be started ({error.strerror}); give its Python") from None
        self._rest = b""
        try:
            self.about: dict[str, Any] = self._ask({"load": dict(load)})["loaded"]
            self.about["idle_cores"] = self._idle_cores()
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> tuple[list[list[int]], float]:
        """The tokens, and the seconds they took by the worker's own clock: the way there and back is not counted."""
        self._signal(signal.SIGCONT)
        try:
            answer = self._ask({"run": {"prompts": list(map(list, prompts)), "new_tokens": list(new_tokens)}})
            return answer["tokens"], float(answer["seconds"])
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the worker and all its children."""
        self._signal(signal.SIGCONT)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what could not be sent is of no use now
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        for number in (signal.SIGTERM, signal.SIGKILL):  # a child may outlive the worker
            if self._signal(number):
                time.sleep(0.5)
        self._process.wait()
        self._log.close()

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send one line, wait for one line. Raises MinillmError with the worker's own words when it fails."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line())
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise MinillmError(f"peer {self.name}: its worker gave no answer ({error}): {self._tail()}") from None
        if "error" in answer:
            raise MinillmError(f"peer {self.name}: {answer['error']}: {self._tail()}")
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        end = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not ready.select(max(0.0, end - time.monotonic())):
                    raise ValueError(f"no answer in {PATIENCE:.0f} s")
                if not (piece := os.read(self._process.stdout.fileno(), 1 << 16)):
                    raise ValueError(f"it ended with exit code {self._process.wait(timeout=10)}")
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _tail(self) -> str:
        """The last thing the worker wrote to its log."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2000))
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it wrote no log")

    def _signal(self, number: int) -> bool:
        """Signal every process of the worker's group; False when none is left."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _idle_cores(self, window: float = 1.0) -> float | None:
        """Cores that the group keeps busy with nothing to do, over `window` seconds once it has settled; Linux only."""
        time.sleep(window)
        before = _cpu_seconds(self._process.pid)
        time.sleep(window)
        after = _cpu_seconds(self._process.pid)
        return None if before is None or after is None else round((after - before) / window, 2)


def _cpu_seconds(group: int) -> float | None:
    """User and system time of all processes of a process group so far, or None where there is no /proc."""
    if not Path("/proc/self/stat").exists():
        return None
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def make(name: str, folder: Path, dtype: torch.dtype, device: str) -> TransformersPeer:
    """The peer of `bench single`, whose logits are compared too."""
    if name != IN_PROCESS:
        raise MinillmError(f"peer {name!r} is not known here; use {IN_PROCESS}")
    return TransformersPeer(folder, dtype, device)


def start(side: str, python: str, load: Mapping[str, Any]) -> WorkerPeer:
    """A worker with its engine loaded, stopped until it is asked. side: a peer's name, or one and its variant."""
    script = WORKERS[side.split("-")[0]]
    return WorkerPeer(side, python, Path(__file__).parent / "peer_workers" / script, load)
