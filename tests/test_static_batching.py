"""Static groups over pages (lesson 09): the same tokens as continuous batching, in more steps."""

import shutil

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import LLM, SamplingParams

PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [9] * 20, [6, 5, 3, 5, 8, 9, 7]]
LENGTHS = [3, 20, 2, 9]


@pytest.fixture(scope="module")
def engines(tiny_folder, tmp_path_factory):
    small = {"num_kv_blocks": 12, "max_model_len": 64, "dtype": "float32", "max_num_seqs": 2}
    folder = tmp_path_factory.mktemp("static") / "model"
    shutil.copytree(tiny_folder("llama"), folder)
    Backend(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return {batching: LLM(folder, batching=batching, **small) for batching in ("static", "continuous")}


def test_static_groups_over_pages_give_the_tokens_of_continuous_batching(engines):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in LENGTHS]
    tokens, steps = {}, {}
    for name, llm in engines.items():
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        tokens[name] = [o.outputs[0].token_ids for o in outputs]
        steps[name] = len(llm.engine.events.of("step"))
        llm.engine.cache.check()
        assert llm.engine.cache.num_live == 0
        assert llm.engine.cache.promised == 0
    assert tokens["static"] == tokens["continuous"]
    assert [len(t) for t in tokens["static"]] == LENGTHS
    # A group: a step a prompt, then as many as its longest answer needs beyond the first token.
    assert steps["static"] == (2 + 19) + (2 + 8)
    # 20 for the longest; 3 + 2 + 9 tokens of the others fit beside it.
    assert steps["continuous"] == 20
