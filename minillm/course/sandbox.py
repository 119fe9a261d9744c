"""What runs inside the process that holds a submission: cells first, then one call at a time, over a pipe.

Started by `minillm.course.session` as a script of its own, so that it holds no reference, no expected value and no
check. What it refuses, and how: memory, CPU time and file size by `setrlimit`; the network by an empty network
namespace where the kernel allows one. Two guards then share one policy: read the interpreter, its packages and the
system's libraries, never notebooks or the course's own source; write in the scratch folder; no processes, no network.

- `landlock`: the kernel enforces it, against native code as well. Linux 5.13 or later; see `landlock.py` for its gaps.
- `audit`: Python's audit hook, with clear words for the learner; see `audit.py` for what passes it by. It alone guards
  imports of minillm, chmod, chown and utime, and it is the only guard where there is no Landlock (macOS, old kernels).

Kernels of an answer run in Triton's interpreter, which follows any address. `kernel_watch` lets them touch the tensors
of their launch and nothing else; native code of an answer is not held by it, and may crash the process, which costs
that answer its points.

The grade's JSON says which was on. Neither stops native code from forking. With `audit` alone this stops accidents and
casual cheating; with `landlock` also the reading of references. For hostile submissions run the grader itself in a
container. Tooling of all lessons.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import linecache
import os
import sys
import types
from typing import Any


class Pipe:
    """Length-prefixed JSON on two file descriptors that the submission's prints cannot reach by accident."""

    def __init__(self) -> None:
        self.inp, self.out = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)

    def receive(self) -> Any:
        return json.loads(self._read(int.from_bytes(self._read(8), "big")))

    def _read(self, size: int) -> bytes:
        raw = b""
        while len(raw) < size:
            part = os.read(self.inp, min(size - len(raw), 1 << 20))
            if not part:
                os._exit(0)  # the grader is gone
            raw += part
        return raw

    def send(self, raw: bytes) -> None:
        raw = len(raw).to_bytes(8, "big") + raw
        while raw:
            raw = raw[os.write(self.out, raw) :]


def limit(setup: dict[str, Any]) -> None:
    """Resource limits and, on Linux, no network and no life after the grader."""
    import resource

    def cap(which: str, value: int) -> None:
        if (kind := getattr(resource, which, None)) is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (value, value))

    cap("RLIMIT_CORE", 0)
    cap("RLIMIT_FSIZE", 64 * 2**20)
    cap("RLIMIT_NOFILE", 512)
    cap("RLIMIT_CPU", int(setup["cpu_s"]))
    cap("RLIMIT_DATA" if sys.platform == "linux" else "RLIMIT_AS", int(setup["memory_mb"]) * 2**20)
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
        new_net, new_user = 0x40000000, 0x10000000
        if libc.unshare(new_net):
            libc.unshare(new_net | new_user)


def stand_ins(package: str, allow: list[str]) -> None:
    """A `minillm` that holds the allowed modules and a `check` that does nothing: the grader checks later."""
    for name, path in (("minillm", [package]), ("minillm.course", []), ("minillm.course.checks", [])):
        module = types.ModuleType(name)
        module.__path__ = path
        sys.modules[name] = module
    for name in allow:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if (error.name or "").startswith("minillm"):
                raise
            # Triton is not there on this system: the answers that need it will say so, the others are graded.
    sys.modules["minillm"].__path__ = []

    def check(task_id: str, candidate: Any) -> float:
        return 0.0

    @contextlib.contextmanager
    def needs(*task_ids: str) -> Any:
        with contextlib.suppress(NotImplementedError):
            yield

    for name in ("minillm.course", "minillm.course.checks"):
        sys.modules[name].__dict__.update(check=check, needs=needs)


def guard(setup: dict[str, Any], landlock: Any, audit: Any) -> str:
    """Refuse, from now on, what no answer needs. Returns the strongest guard that is on."""
    readable, forbidden = [*setup["readable"], f"/proc/{os.getpid()}"], setup["forbidden"]
    scratch = os.path.realpath(setup["scratch"])
    wanted, kernel = setup["guards"], False
    if "landlock" in wanted:
        kernel = landlock.restrict([*readable, scratch], forbidden, [scratch, os.devnull])
    if "audit" in wanted:
        audit.take_away(torch_too=not kernel)
        sys.addaudithook(audit.hook(readable, forbidden, scratch))
    return "landlock" if kernel else "audit" if "audit" in wanted else "none"


def plain(text: str) -> str:
    """A cell without IPython's magics and shell lines; a `%%` cell is skipped as a whole."""
    if text.lstrip().startswith("%%"):
        return ""
    try:
        compile(text, "<cell>", "exec")
        return text
    except SyntaxError:
        marks = ("%", "!", "?")
        lines = ["pass" if line.strip().startswith(marks) else line for line in text.split("\n")]
        return "\n".join(lines)
    except ValueError:  # a null byte
        return text


def as_it_stands(answer: Any) -> Any:
    """The function with the names it sees now: a later cell may give a helper's name, such as a kernel's, away."""
    if not isinstance(answer, types.FunctionType):
        return answer
    names = (dict(answer.__globals__), answer.__name__, answer.__defaults__, answer.__closure__)
    copy = types.FunctionType(answer.__code__, *names)
    copy.__kwdefaults__ = answer.__kwdefaults__
    return copy


def run_cells(setup: dict[str, Any], pipe: Pipe, host: Any, host_module: Any) -> None:
    """Execute the cells in order; at a check cell keep what the task's name stands for at that point."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    space = main.__dict__
    errors: list[Any] = []

    def keep(task_id: str, name: str) -> None:
        if callable(space.get(name)):
            host.objects[task_id] = as_it_stands(space[name])

    for item in setup["cells"]:
        if "keep" in item:
            keep(item["keep"], item["name"])
            continue
        number = item["number"]
        pipe.send(json.dumps({"cell": number}).encode())
        text, name = plain(item["source"]), f"<cell {number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        try:
            with host_module.time_limit(setup["cell_s"]):
                exec(compile(text, name, "exec"), space)
        except NotImplementedError:
            pass  # a stub, called by the learner's own cell
        except BaseException as error:
            errors.append([number, host_module.describe(error)])
    for task_id, name in setup["names"].items():
        if task_id not in host.objects:
            keep(task_id, name)
    callables = [n[:80] for n, v in list(space.items()) if isinstance(n, str) and callable(v)][:500]
    found = [task_id for task_id in setup["names"] if task_id in host.objects]
    pipe.send(host.wire.dumps({"loaded": errors, "found": found, "names": callables}))


def load(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watch_kernels(here: str) -> Any:
    """For a lesson whose answers hold kernels: from now on no kernel touches what it was not given."""
    if "minillm.kernels.triton_private" not in sys.modules:
        return None
    watch = load("_kernel_watch", os.path.join(here, "kernel_watch.py")).Watch()
    watch.__enter__()
    return lambda: contextlib.nullcontext(watch)


def worlds_of_ranks(here: str) -> Any:
    """For a lesson whose answers run on ranks."""
    if "minillm.parallel.group" not in sys.modules:
        return None
    return load("_ranks", os.path.join(here, "ranks.py")).run


def main() -> None:
    sys.dont_write_bytecode = True
    pipe = Pipe()
    setup = pipe.receive()
    sys.path[:] = setup["path"]
    limit(setup)
    here = os.path.join(setup["package"], "course")
    wire, host_module = load("_wire", os.path.join(here, "wire.py")), load("_host", os.path.join(here, "host.py"))
    landlock, audit = (load(f"_{name}", os.path.join(here, f"{name}.py")) for name in ("landlock", "audit"))
    stand_ins(setup["package"], setup["allow"])
    if setup["torch"]:  # seconds, and many on a busy machine: no cell has to answer for them
        with contextlib.suppress(Exception):  # the cell that imports it will say why it cannot
            importlib.import_module("torch")
    os.dup2(1, 2)  # so far an error of this script could be read by the grader; the submission's are not

    def callback(number: int, args: list[Any]) -> Any:
        pipe.send(wire.dumps({"callback": number, "args": wire.encode(args, host.keep)}))
        reply = pipe.receive()
        if "error" in reply:
            raise {"TypeError": TypeError, "ValueError": ValueError}.get(reply["error"], RuntimeError)(reply["message"])
        return wire.decode(reply["ok"], lambda i, _: host.objects[i])

    host = host_module.Host(wire, callback, swallow=True, watch=watch_kernels(here), world=worlds_of_ranks(here))
    pipe.send(json.dumps({"guard": guard(setup, landlock, audit)}).encode())
    run_cells(setup, pipe, host, host_module)
    while True:
        request = pipe.receive()
        what = (request[key] for key in ("target", "attr", "args", "limit", "gaps", "only"))
        reply = host.call(*what)
        try:
            raw = wire.dumps(reply)
        except Exception as error:
            raw = json.dumps(host_module.describe(error)).encode()
        pipe.send(raw)


if __name__ == "__main__":
    main()
