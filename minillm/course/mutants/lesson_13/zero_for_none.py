"""A deadline of 0 seconds is taken for none."""

import heapq
import math

TASK = "13.5"
POINTS = 15
HINT = "a deadline of 0 s is one"


class Admission:
    def __init__(self, max_waiting, max_waiting_tokens, max_model_len, longest_token):
        self.max_waiting, self.max_waiting_tokens = max_waiting, max_waiting_tokens
        self.max_model_len, self.longest_token = max_model_len, longest_token

    def wait(self, queue):
        if queue["step_s"] is None:
            return None
        free = list(queue["running_left"]) + [0.0] * (queue["max_num_seqs"] - queue["running"])
        heapq.heapify(free)
        if queue["ahead"]:
            mean = queue["ahead_output"] / queue["ahead"]
            for _ in range(queue["ahead"]):
                heapq.heapreplace(free, free[0] + mean)
        return free[0] * queue["step_s"] + queue["prefill_s"]

    def admit(self, ask, queue):
        m = ask["prompt_tokens"]
        if m is None:
            m = math.ceil(ask["prompt_bytes"] / self.longest_token)
        if m + 1 > self.max_model_len:
            return 400, f"the prompt has {m} tokens, the context has {self.max_model_len}", None
        wait = self.wait(queue)
        places = max(0, queue["max_num_seqs"] - queue["running"] - queue["waiting"])
        more = max(0, ask["n"] - places)
        back = 1.0 if wait is None else max(1.0, wait)
        if more and (queue["running"] or queue["waiting"]):
            if queue["waiting"] + more > self.max_waiting:
                return 429, "too many requests are waiting already", back
            if queue["waiting_tokens"] + more * (m + ask["max_tokens"]) > self.max_waiting_tokens:
                return 429, "too many tokens are waiting already", back
        if ask["deadline_s"] and wait is not None and ask["deadline_s"] < wait:
            return 429, "it would begin too late", max(1.0, wait - ask["deadline_s"])
        return None
