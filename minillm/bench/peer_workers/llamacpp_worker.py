"""llama.cpp on the bench's requests, through llama-cpp-python's C interface: all sequences in one batch a step, greedy.

It is what its server does: sequences that decode go first, prompts take the room that is left in a batch. With
prefix caching the longest common prefix is computed once and its cells are given to every sequence.
"""

from __future__ import annotations

import ctypes
from typing import Any

from protocol import serve

KV_TYPES = {"float32": 0, "float16": 1, "bfloat16": 1}  # f32, and f16, its default
BATCH = 2048


class Engine:
    def __init__(self, load: dict[str, Any], llama: Any, numpy: Any):
        self.load, self.llama, self.numpy = load, llama, numpy
        self.context: Any = None
        self.memory: Any = None
        self.shape = (0, 0)  # sequences, cells of each
        how = llama.llama_model_default_params()
        how.use_extra_bufts = load["extra_buffers"]  # weights laid out for AMX and the like, where they support it
        self.model = llama.llama_model_load_from_file(load["gguf"].encode(), how)
        if not self.model:
            raise RuntimeError("llama.cpp cannot load this GGUF file")
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(BATCH, 0, 1)

    def prepare(self, prompts: list[list[int]], new_tokens: list[int]) -> None:
        """A context that holds these requests side by side, empty."""
        llama = self.llama
        longest = max(len(p) + n for p, n in zip(prompts, new_tokens, strict=True))
        shape = (min(self.load["max_num_seqs"], len(prompts)), -(-(longest + 1) // 256) * 256)
        if shape != self.shape:
            if self.context:
                llama.llama_free(self.context)
            how = llama.llama_context_default_params()
            how.n_seq_max, how.n_ctx, how.n_batch = shape[0], shape[0] * shape[1], BATCH
            how.n_threads = how.n_threads_batch = self.load["threads"]
            how.type_k = how.type_v = KV_TYPES[self.load["dtype"]]
            how.flash_attn_type = 1  # enabled: the faster one on many streams
            how.no_perf = True
            self.context, self.shape = llama.llama_init_from_model(self.model, how), shape
            if not self.context:
                raise RuntimeError("llama.cpp cannot make a context of this size")
            self.memory = llama.llama_get_memory(self.context)
        llama.llama_memory_clear(self.memory, True)

    def run(self, prompts: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        free = list(range(self.shape[0]))
        waiting = list(range(len(prompts)))
        running: dict[int, Any] = {}  # sequence -> [request, position of its next token, tokens to compute]
        shared = self._share(prompts) if self.load["prefix_caching"] else 0
        while waiting or running:
            while waiting and free:
                sequence, request = free.pop(0), waiting.pop(0)
                start = shared if request < self.shape[0] else 0  # a sequence that was used before holds no prefix
                running[sequence] = [request, start, prompts[request][start:]]
            sampled = self._fill(running)
            if self.llama.llama_decode(self.context, self.batch):
                raise RuntimeError("llama_decode failed")
            for sequence, row in sampled:
                state = running[sequence]
                token = self._best(row)
                outputs[state[0]].append(token)
                state[2] = [token]
                if len(outputs[state[0]]) == new_tokens[state[0]]:
                    del running[sequence]
                    free.append(sequence)
                    self.llama.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        return outputs

    def _share(self, prompts: list[list[int]]) -> int:
        """Compute what all prompts begin with, give it to every sequence, and return how many tokens that is."""
        limit = min(map(len, prompts)) - 1  # the last token of a prompt is computed: its logits are needed
        first = prompts[0]
        shared = next((i for i in range(limit) if any(p[i] != first[i] for p in prompts)), limit)
        for start in range(0, shared, BATCH):
            self.batch.n_tokens = 0
            for i in range(start, min(shared, start + BATCH)):
                self._add(first[i], i, 0, False)
            if self.llama.llama_decode(self.context, self.batch):
                raise RuntimeError("llama_decode failed")
        for sequence in range(1, self.shape[0] if shared else 1):
            self.llama.llama_memory_seq_cp(self.memory, 0, sequence, 0, -1)
        return shared

    def _fill(self, running: dict[int, Any]) -> list[tuple[int, int]]:
        """Put the next tokens into the batch, decodes first; returns (sequence, row of its logits) where one is due."""
        self.batch.n_tokens = 0
        sampled = []
        for sequence, state in sorted(running.items(), key=lambda item: len(item[1][2])):
            take = state[2][: BATCH - self.batch.n_tokens]
            whole = bool(take) and len(take) == len(state[2])
            for i, token in enumerate(take):
                self._add(token, state[1] + i, sequence, whole and i == len(take) - 1)
            if whole:
                sampled.append((sequence, self.batch.n_tokens - 1))
            state[1], state[2] = state[1] + len(take), state[2][len(take) :]
        return sampled

    def _add(self, token: int, position: int, sequence: int, logits: bool) -> None:
        b, i = self.batch, self.batch.n_tokens
        b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, logits
        b.seq_id[i][0] = sequence
        b.n_tokens = i + 1

    def _best(self, row: int) -> int:
        logits = self.llama.llama_get_logits_ith(self.context, row)
        return int(self.numpy.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())


QUIET: list[Any] = []  # the callback that C holds no reference to


def make(load: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    import llama_cpp
    import numpy

    llama_cpp.llama_backend_init()
    QUIET.append(llama_cpp.llama_log_callback(lambda level, text, data: None))
    llama_cpp.llama_log_set(QUIET[0], ctypes.c_void_p(0))
    engine = Engine(load, llama_cpp, numpy)
    trial = [list(range(100, 164))]  # a processor that refuses an instruction ends the process here, before the race
    engine.prepare(trial, [2])
    engine.run(trial, [2])
    system = llama_cpp.llama_print_system_info().decode()
    how = {
        "system": system,
        "flash_attention": True,
        "batch": BATCH,
        "extra_buffers": load["extra_buffers"],
        "prefix_caching": load["prefix_caching"],
    }
    return engine, {"version": llama_cpp.__version__, "how": how}


if __name__ == "__main__":
    serve(make)
