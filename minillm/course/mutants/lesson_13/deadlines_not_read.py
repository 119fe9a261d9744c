"""A request that comes too late is let in."""

import heapq

TASK = "13.5"
POINTS = 15
HINT = "compare the wait with the deadline"


class Admission:
    def __init__(self, max_waiting: int, max_waiting_tokens: int, max_model_len: int, longest_token: int):
        self.max_waiting, self.max_waiting_tokens = max_waiting, max_waiting_tokens
        self.max_model_len, self.longest_token = max_model_len, longest_token

    def wait(self, queue: dict) -> float | None:
        if queue["step_s"] is None:
            return None
        free = [*queue["running_left"], *[0.0] * (queue["max_num_seqs"] - queue["running"])]
        heapq.heapify(free)
        for _ in range(queue["ahead"]):
            heapq.heapreplace(free, free[0] + queue["ahead_output"] / queue["ahead"])
        return free[0] * queue["step_s"] + queue["prefill_s"]

    def admit(self, ask: dict, queue: dict) -> tuple[int, str, float | None] | None:
        prompt, wait = ask["prompt_tokens"], self.wait(queue)
        if prompt is None:
            prompt = -(-ask["prompt_bytes"] // self.longest_token)
        if prompt >= self.max_model_len:
            return 400, f"the prompt has at least {prompt} tokens, the context {self.max_model_len}", None
        inside = queue["running"] + queue["waiting"]
        waits = max(0, ask["n"] - max(0, queue["max_num_seqs"] - inside))
        tokens = waits * (prompt + ask["max_tokens"])
        many = queue["waiting"] + waits > self.max_waiting
        if waits and inside and (many or queue["waiting_tokens"] + tokens > self.max_waiting_tokens):
            retry = 1.0 if wait is None else max(1.0, wait)
            return 429, f"the queue is full: {queue['waiting']} wait; try again in {retry:.0f} s", retry
        return None
