"""Configuration of the engine: model, caches, scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from serve_spec.config.base import Refusal, StrictModel

MAX_POSITIONS = 1 << 21
"""Maximum length: rotary tables with a row per position are computed at startup."""


class ModelConfig(StrictModel):
    """The target model and the device it runs on."""

    path: Path
    """Checkpoint folder: absolute, relative to the config file, or 'asset:NAME'."""
    served_model_name: str = ""
    """Model name in requests; null or empty: the last part of `path`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations; auto: float32 on a CPU, on a GPU float16 if config.json
    names it and bfloat16 if not."""
    max_model_len: int | None = Field(None, ge=1, le=MAX_POSITIONS)
    """Maximum length of prompt and output, in tokens; null: the model's own limit."""
    tensor_parallel_size: int = Field(1, ge=1, le=1024)
    """Number of GPUs that share one model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto: a GPU if there is one."""
    async_scheduling: bool | None = None
    """Launch a step before the result of the previous one is read, so that the device does not wait
    for the host; null: true on a GPU."""
    cuda_graphs: bool = True
    """Capture the stages of a step as CUDA graphs on a GPU."""
    attention_backend: Literal["auto", "torch", "flashinfer"] = "auto"
    """No effect, since there is one attention implementation; accepted for old files."""
    execution: Literal["auto", "eager", "lanes"] = "auto"
    """Old name of async_scheduling (eager: false, lanes: true); accepted for old files."""
    torch_compile: bool = False
    """Compile the layers with torch.compile instead of using the Triton kernels; slower to start,
    one GPU only."""

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _null_is_unnamed(cls, name: object) -> object:
        return "" if name is None else name

    @model_validator(mode="after")
    def _compiles_on_one_rank(self) -> Self:
        if self.torch_compile and self.tensor_parallel_size > 1:
            size = self.tensor_parallel_size
            fix = f"not supported with tensor_parallel_size={size}; set it to false"
            raise Refusal("torch_compile", True, fix)
        return self

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        asynchronous = self.async_scheduling
        if asynchronous is None and self.execution != "auto":
            asynchronous = self.execution == "lanes"
        return self._derive(
            served_model_name=self.served_model_name or self.path.name,
            async_scheduling=asynchronous,
        )


class CacheConfig(StrictModel):
    """The paged KV cache of target and draft."""

    page_size: int = Field(16, ge=1, le=4096)
    """Tokens per page."""
    num_pages: int | None = Field(None, ge=1)
    """Number of pages; null: as many as fit the memory budget."""
    prefix_caching: bool = True
    """Reuse the KV cache of prompts that start with the same tokens."""
    memory_fraction: float = Field(0.85, gt=0, lt=1)
    """Fraction of the free GPU memory used for the caches."""
    cpu_cache_gb: float = Field(1.0, gt=0)
    """Memory for the caches on a CPU, in GiB."""


class SchedulerConfig(StrictModel):
    """Limits of the batch and of a step."""

    max_num_seqs: int = Field(64, ge=1, le=4096)
    """Maximum number of sequences that run together in one engine."""
    max_num_batched_tokens: int = Field(2048, ge=1, le=1 << 20)
    """Maximum number of tokens of one target forward pass, drafts included."""
    chunked_prefill_size: int | None = Field(640, ge=1)
    """Maximum number of prompt tokens of a step while requests decode, or 10 per decoding request
    if that is more; null: prompts are not split."""
    max_waiting_seqs: int = Field(1024, ge=1, le=1 << 20)
    """Maximum number of sequences waiting in one engine; further ones are rejected."""
