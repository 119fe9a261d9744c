"""Traffic: what arrives, when, and how long it is.

prefixes.py   prompts that begin alike: system prompt, few-shot, retrieved documents, conversations (lesson 11)
"""
