"""`set` replaces the input, and the calls follow it by name."""

import torch

TASK = "07.5"
POINTS = 6
HINT = "the input moved"


class Graph:
    def __init__(self, program, inputs):
        self.program = program
        self.memory = {name: value.clone() for name, value in inputs.items()}
        for function, names, out in program:
            self.memory[out] = getattr(torch, function)(*(self.memory[n] for n in names)).clone()
        self.kept = []

    def set(self, name, value):
        here = self.memory[name]
        if here.shape != value.shape or here.dtype != value.dtype:
            raise ValueError(name)
        self.kept.append(here)
        self.memory[name] = value.clone()

    def replay(self):
        for function, names, out in self.program:
            self.memory[out].copy_(getattr(torch, function)(*(self.memory[n] for n in names)))

    def get(self, name):
        return self.memory[name].clone()

    def address(self, name):
        return self.memory[name].data_ptr()

    def around(self, name):
        before = self.get(name)
        self.replay()
        return before, self.get(name)
