"""Weight formats of targets by `quant_method` of `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from serve_spec.core.errors import CheckpointError
from serve_spec.core.registry import Registry

if TYPE_CHECKING:
    from serve_spec.layers.formats.base import Formats

MakeFormats: TypeAlias = "Callable[[Mapping[str, Any]], Formats]"
"""Returns the formats of a checkpoint from its `quantization_config`.

Raises CheckpointError for what it does not compute.
"""

FORMATS: Registry[MakeFormats] = Registry("quant_method", ["__call__"])


def register_format(place: str, method: str) -> None:
    """Let `place`, `package.module:function`, make the formats of a `quant_method`.

    It is a `MakeFormats`. Raises PluginError: the method is taken.
    """
    FORMATS.add(method, place)


def formats_of(config: Mapping[str, Any]) -> Formats | None:
    """Return the formats that a config's `quantization_config` asks for; None without it.

    Raises CheckpointError: the method is not known, or as `MakeFormats`.
    """
    settings = config.get("quantization_config")
    if not settings:
        return None
    method = str(settings.get("quant_method", "unknown"))
    if method not in FORMATS:
        known = f"one of {sorted(FORMATS.names())} or " if FORMATS.names() else ""
        why = f"config.json: quantization_config.quant_method={method!r}: not supported"
        raise CheckpointError(f"{why}; use {known}the float32, bfloat16 or float16 checkpoint")
    return FORMATS.load(method)(settings)


register_format("serve_spec.layers.formats.compressed_tensors:formats", "compressed-tensors")
register_format("serve_spec.layers.formats.fp8:formats", "fp8")
register_format("serve_spec.layers.formats.modelopt:formats", "modelopt")
register_format("serve_spec.layers.formats.awq:formats", "awq")
register_format("serve_spec.layers.formats.gptq:formats", "gptq")
register_format("serve_spec.layers.formats.gguf:formats", "gguf")
