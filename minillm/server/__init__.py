"""The engine behind HTTP: an OpenAI-style server that users can trust. Lesson 13 builds it.

`app.make_app(llm)` is the whole server as an ASGI application; `minillm serve` runs it, `LocalServer` runs it inside a
notebook or a test. Importing this package needs nothing; its modules need the extra `server` (fastapi, uvicorn,
prometheus-client).
"""
