"""One answer and one stream through langchain-openai. Runs in the environment of `make clients`; prints one object."""

import json
import sys

import openai
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    model=sys.argv[2], base_url=sys.argv[1] + "/v1", api_key="sk-of-a-client", temperature=0, max_tokens=12,
    stream_usage=True, max_retries=0,
)  # fmt: skip
question = [("human", "What is the capital of France?")]
whole = model.invoke(question)
chunks = list(model.stream(question))
together = chunks[0]
for chunk in chunks[1:]:
    together += chunk
tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
try:
    model.bind_tools([tool]).invoke(question)
    refused = None
except openai.BadRequestError as error:
    refused = str(error)
print(json.dumps({
    "text": whole.content, "usage": whole.usage_metadata["total_tokens"], "streamed": together.content,
    "stream_usage": together.usage_metadata["total_tokens"], "refused": refused,
}))  # fmt: skip
