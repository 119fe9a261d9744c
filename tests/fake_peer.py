"""A peer's worker that needs no peer: it answers with tokens that only the prompt decides, or misbehaves as asked."""

import os
import subprocess
import sys
from pathlib import Path

import minillm.bench

sys.path.insert(0, str(Path(minillm.bench.__file__).parent / "peer_workers"))
from protocol import serve


class Engine:
    def __init__(self, load):
        self.mode = load.get("mode", "")
        self.prepared = 0
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def prepare(self, prompts, new_tokens):
        self.prepared += 1

    def run(self, prompts, new_tokens):
        print("a peer that prints")  # between two answers of the protocol
        os.system("echo and its children too")
        if self.mode == "raises":
            raise RuntimeError("out of luck")
        if self.mode == "dies":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        short = self.mode == "short"
        return [[(p[-1] + self.prepared) % 1000 + 100] * (n - short) for p, n in zip(prompts, new_tokens)]


def make(load):
    if load.get("mode") == "refuses":
        raise ValueError("no such weights")
    print("loading ...")
    engine = Engine(load)
    return engine, {"version": "1.2", "how": {"child": engine.child.pid}}


if __name__ == "__main__":
    serve(make)
