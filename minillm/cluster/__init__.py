"""More than one engine: replicas that share a load, and engines that share the work on one request. Lessons 14 to 16.

replica.py               what a replica is, whatever runs it: a snapshot for decisions, a stream of tokens (lesson 14)
driver.py                what all drivers share: who is under way, when silence is death
in_process.py            driver: an `AsyncLLM` of this process
remote.py                driver: any OpenAI-style server, with token ids
local_process.py         driver: a `minillm serve` of its own, started, watched and ended
completion.py, http.py   a request and its stream on the wire
data_parallel.py         several replicas as one: the least loaded gets the next request
layout.py                how KV lies in an engine's pool, and which layouts can be turned into each other (lesson 15)
ticket.py                what is being handed over, for whom, in which attempt
transport.py             channels that carry messages and tensors: within a process and between processes
transfer.py              prefill to decode as two state machines: reserve, receive, resume or recompute
transfer_events.py       what they are told and what they answer
disagg.py                what the engines around them share; link.py: a channel with a thread for each direction
prefill_worker.py        the prefill engine's side; exporter.py: KV out of a step, layer by layer
remote_prefill.py        the decode engine's side; prefill_peer.py: its connection; importer.py: KV into blocks
operating_point.py       one replica under load, from its predicted steps: rate, TTFT, TPOT (lesson 14)
fleet.py                 devices, nodes and the links between them
planner.py               which of TP, PP and DP serves a model on a set of devices, and why
plan_advice.py           the plan in words, and what would do where nothing does
plan_tables.py           the tables of docs/parallel.md and docs/pd_split.md
split_planner.py         when a prefill/decode split pays, and when it does not (lesson 15)
split_reasons.py         why not, asked of the model
goodput.py               one pool at one rate: the share within TTFT and TPOT; pools.py: at its best chunk and rate
step_times.py            seconds of steps under one workload
migration.py             what moving KV costs: locate, transfer, layout, allocate
paced.py                 fleets under a virtual clock, with the scheduler that serves
paced_split.py           prefill and decode engines there, over the very machines of transfer.py
paced_replicas.py        the same load on more and more replicas
paced_goodput.py         predicted beside paced; paced_grid.py: shapes that were held out
"""
