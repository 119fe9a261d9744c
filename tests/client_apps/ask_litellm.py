"""One answer and one stream through litellm. Runs in the environment of `make clients`; prints one JSON object."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a price list
import litellm

litellm.telemetry = False
asked = {
    "model": f"openai/{sys.argv[2]}", "api_base": sys.argv[1] + "/v1", "api_key": "sk-of-a-client", "temperature": 0,
    "max_tokens": 12, "messages": [{"role": "user", "content": "What is the capital of France?"}], "num_retries": 0,
}  # fmt: skip
whole = litellm.completion(**asked)
chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
try:
    litellm.completion(**asked, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    refused = None
except litellm.BadRequestError as error:
    refused = str(error)
print(json.dumps({
    "text": whole.choices[0].message.content, "usage": whole.usage.total_tokens,
    "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
    "stream_usage": next(c.usage.total_tokens for c in reversed(chunks) if getattr(c, "usage", None)),
    "refused": refused,
}))  # fmt: skip
