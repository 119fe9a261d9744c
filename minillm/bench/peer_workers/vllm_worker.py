"""vLLM on the bench's requests: its offline `LLM.generate`, compiled as it is by default, greedy, text left out."""

from __future__ import annotations

import os
from typing import Any

from protocol import serve


class Engine:
    def __init__(self, load: dict[str, Any]):
        from vllm import LLM

        self.llm = LLM(
            model=load["model"], dtype=load["dtype"], max_model_len=load["max_model_len"],
            max_num_seqs=load["max_num_seqs"], enable_prefix_caching=load["prefix_caching"], disable_log_stats=True,
            seed=0,
        )  # fmt: skip

    def prepare(self, prompts: list[list[int]], new_tokens: list[int]) -> None:
        self.llm.reset_prefix_cache()

    def run(self, prompts: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in new_tokens]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]


def make(load: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if load["device"] == "cpu":
        cores = sorted(os.sched_getaffinity(0))[: load["threads"]]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    import vllm

    engine = Engine(load)
    how = {"compiled": True, "prefix_caching": load["prefix_caching"], "max_num_seqs": load["max_num_seqs"]}
    how["omp_threads_bind"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
    return engine, {"version": vllm.__version__, "how": how}


if __name__ == "__main__":  # vLLM starts its engine in a child that imports this file again
    serve(make)
