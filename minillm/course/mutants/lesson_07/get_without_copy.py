"""`get` hands out the buffer itself, which the next replay overwrites."""

import torch

TASK = "07.5"
POINTS = 7
HINT = "what was handed out changes with the next replay"


class Graph:
    def __init__(self, program, inputs):
        self.program = program
        self.memory = {name: value.clone() for name, value in inputs.items()}
        for function, names, out in program:
            self.memory[out] = getattr(torch, function)(*(self.memory[n] for n in names)).clone()

    def set(self, name, value):
        here = self.memory[name]
        if here.shape != value.shape or here.dtype != value.dtype:
            raise ValueError(name)
        here.copy_(value)

    def replay(self):
        for function, names, out in self.program:
            self.memory[out].copy_(getattr(torch, function)(*(self.memory[n] for n in names)))

    def get(self, name):
        return self.memory[name]

    def address(self, name):
        return self.memory[name].data_ptr()

    def around(self, name):
        before = self.get(name)
        self.replay()
        return before, self.get(name)
