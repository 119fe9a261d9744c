"""minillm: an LLM inference engine that a course builds, and the course that builds it.

The public interface is here; importing it loads torch only when something is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "EngineConfig", "MinillmError", "ModelConfig", "RequestOutput", "SamplingParams", "__version__",
]  # fmt: skip

if TYPE_CHECKING:
    from minillm.async_llm import AsyncLLM
    from minillm.config import ModelConfig
    from minillm.engine_config import EngineConfig
    from minillm.errors import MinillmError
    from minillm.llm import LLM
    from minillm.request import RequestOutput, SamplingParams

_HOME = {
    "AsyncLLM": "minillm.async_llm",
    "LLM": "minillm.llm",
    "EngineConfig": "minillm.engine_config",
    "MinillmError": "minillm.errors",
    "ModelConfig": "minillm.config",
    "RequestOutput": "minillm.request",
    "SamplingParams": "minillm.request",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'minillm' has no attribute {name!r}")
