"""serve_spec: adaptive speculative decoding for LLM serving.

The public names load on first use, so that importing the package pulls in neither torch nor Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve_spec.config import ServeSpecConfig as ServeSpecConfig
    from serve_spec.core.grammar import Grammar as Grammar
    from serve_spec.core.request import RequestOutputKind as RequestOutputKind
    from serve_spec.core.request import SamplingParams as SamplingParams
    from serve_spec.core.request import SpeculativeOptions as SpeculativeOptions
    from serve_spec.core.request import StructuredOutputsParams as StructuredOutputsParams
    from serve_spec.engine.async_llm import AsyncLLM as AsyncLLM
    from serve_spec.engine.llm import LLM as LLM

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Grammar",
    "RequestOutputKind",
    "SamplingParams",
    "ServeSpecConfig",
    "SpeculativeOptions",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "AsyncLLM": "serve_spec.engine.async_llm",
    "Grammar": "serve_spec.core.grammar",
    "LLM": "serve_spec.engine.llm",
    "RequestOutputKind": "serve_spec.core.request",
    "SamplingParams": "serve_spec.core.request",
    "ServeSpecConfig": "serve_spec.config",
    "SpeculativeOptions": "serve_spec.core.request",
    "StructuredOutputsParams": "serve_spec.core.request",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'serve_spec' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
