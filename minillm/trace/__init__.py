"""Traffic: what arrives, when, and how long it is.

prefixes.py   prompts that begin alike: system prompt, few-shot, retrieved documents, conversations (lesson 11)
latency.py    stamps of streamed requests: TTFT, ITL, TPOT, percentiles, SLOs and goodput (lesson 13)
report.py     a run in numbers, and its table (lesson 13)
arrivals.py   when requests come and how long they are: Poisson, bursts, ramps (lesson 13)
client.py     sends them to any OpenAI-style server and stamps the answers (lesson 13)
apart.py      the same from a process of its own (lesson 13)
answer.py     chunks of a stream, stamped as they come (lesson 13)
wire.py       HTTP and server-sent events as a client sees them (lesson 13)
"""
