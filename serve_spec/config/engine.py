"""Configuration of the engine: model, caches, scheduler."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from serve_spec.config.base import ASSET, CHECKPOINT, Refusal, StrictModel
from serve_spec.config.hub import checkpoint_folder
from serve_spec.config.plugins import is_plugin_name

MAX_POSITIONS = 1 << 21
"""Maximum length: rotary tables with a row per position are computed at startup."""


class ModelConfig(StrictModel):
    """The target model and the device it runs on."""

    path: Annotated[str, CHECKPOINT]
    """Checkpoint: a hub id ORG/NAME[:GGUF][@REVISION], a folder or GGUF file (absolute, or relative
    to the config file), or 'asset:NAME'."""
    revision: str | None = Field(None, pattern=r"^[\w./-]+$")
    """Branch, tag or commit of a hub id; null: main."""
    download_dir: Path | None = None
    """Existing folder for downloads from the hub; null: HF_HUB_CACHE."""
    load_format: str = "auto"
    """Format of the weights: auto; safetensors; dummy, random weights of the shape in config.json,
    for load tests; or MODULE:FUNCTION of a function that opens the weights of a folder."""
    tokenizer_path: Annotated[str | None, CHECKPOINT] = None
    """Checkpoint of the tokenizer, same forms as `path`; null: the model's own."""
    chat_template: Path | None = None
    """Jinja file of the chat template; null: the tokenizer's own."""
    generation_config: Literal["auto", "none"] = "auto"
    """Sampling parameters of requests that give none; auto: those of the checkpoint's
    generation_config.json, as in vLLM; none: those of the API."""
    served_model_name: str | tuple[str, ...] = ""
    """Model name in requests, or a list of names; answers have the first. Null or empty: the hub
    id, or the last part of `path`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations; auto: float32 on a CPU, on a GPU float16 if config.json
    names it and bfloat16 if not."""
    max_model_len: int | None = Field(None, ge=1, le=MAX_POSITIONS)
    """Maximum length of prompt and output, in tokens; null: the model's own limit."""
    quantization: (
        Literal["auto", "fp8", "compressed-tensors", "modelopt", "awq", "gptq", "gguf"] | None
    ) = None
    """Quantization of target weights: null, auto or the checkpoint's own, as in the checkpoint; fp8
    converts floats when they are loaded, with a scale per row, on GPUs of compute capability 8.9 or
    newer."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the target's KV cache: fp8 or fp8_e4m3, with the scales of the checkpoint or 1,
    on CPUs and GPUs of compute capability 8.9 or newer; the compute dtype; auto: as vLLM does, fp8
    if the checkpoint asks for it, else the compute dtype."""
    tensor_parallel_size: int = Field(1, ge=1, le=1024)
    """Number of GPUs that share one model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto: a GPU if there is one."""
    async_scheduling: bool | None = None
    """Launch a step before the result of the previous one is read, so that the device does not wait
    for the host; null: true on a GPU."""
    cuda_graphs: bool = True
    """Capture the stages of a step as CUDA graphs on a GPU."""
    cuda_graph_max_bs: int | None = Field(None, ge=1)
    """Largest number of decoding requests for which steps are captured, as in SGLang: fewer need
    less memory and start-up time, and larger batches run without graphs; null: max_num_seqs."""
    attention_backend: Literal["auto"] = "auto"
    """Implementation of attention: auto, the package's own; no other is supported."""
    execution: Literal["auto", "eager", "lanes"] = "auto"
    """Old name of async_scheduling (eager: false, lanes: true); accepted for old files."""
    torch_compile: bool = False
    """Compile the layers with torch.compile instead of using the Triton kernels; slower to start,
    one GPU only."""

    @field_validator("load_format")
    @classmethod
    def _is_a_format(cls, name: str) -> str:
        if name not in ("auto", "safetensors", "dummy") and not is_plugin_name(name):
            fix = "use auto, safetensors, dummy or MODULE:FUNCTION of a function that opens weights"
            raise Refusal("load_format", name, fix)
        return name

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _null_is_unnamed(cls, name: object) -> object:
        if isinstance(name, list | tuple) and "" in name:
            raise Refusal("served_model_name", name, "a name is empty; remove it")
        return "" if name is None or name in ([], ()) else name

    @field_validator("attention_backend", mode="before")
    @classmethod
    def _is_supported(cls, value: object) -> object:
        if value not in (None, "auto"):
            fix = "not supported; leave it out: the package's own kernels run on CPUs and GPUs"
            raise Refusal("attention_backend", value, fix)
        return value

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
        local = PurePath(self.path.removeprefix(ASSET)).name.removesuffix(".gguf")
        name = self.path.partition("@")[0] if self.is_on_hub else local
        return self._derive(
            served_model_name=self.served_model_name or name, async_scheduling=asynchronous
        )

    @model_validator(mode="after")
    def _has_one_revision(self) -> Self:
        if self.revision is not None and not (self.is_on_hub and "@" not in self.path):
            fix = f"path={self.path!r} is no hub id without a revision; leave one of them out"
            raise Refusal("revision", self.revision, fix)
        return self

    @property
    def is_on_hub(self) -> bool:
        """Whether `path` is a hub id."""
        return not self.path.startswith((ASSET, "/"))

    @property
    def names(self) -> tuple[str, ...]:
        """Model names of requests; the first one is in answers."""
        named = self.served_model_name
        return (named,) if isinstance(named, str) else named

    @property
    def source(self) -> str:
        """`path` with the revision."""
        return self.path if self.revision is None else f"{self.path}@{self.revision}"

    @property
    def folder(self) -> Path:
        """Local folder of the checkpoint, downloaded if necessary; raises ConfigError."""
        return self.local("model.path", self.source)

    @property
    def metadata_folder(self) -> Path:
        """Local folder of the checkpoint that may lack the weights; raises ConfigError."""
        return self.local("model.path", self.source, weights=False)

    @property
    def tokenizer_folder(self) -> Path:
        """Local folder of the tokenizer and its chat template; raises ConfigError."""
        if self.tokenizer_path is None:
            return self.metadata_folder
        return self.local("model.tokenizer_path", self.tokenizer_path, weights=False)

    def local(self, field: str, name: str, *, weights: bool = True, progress: bool = False) -> Path:
        """Return `checkpoint_folder` in `download_dir`, without the weights of a dummy."""
        weights = weights and self.load_format != "dummy"
        place = self.download_dir
        return checkpoint_folder(
            field, name, download_dir=place, weights=weights, progress=progress
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
    chunked_prefill_size: int | Literal["auto"] | None = "auto"
    """Maximum number of prompt tokens of a step while requests decode; auto: as many as keep the
    batch full, within the two bounds that follow; null: prompts are not split."""
    max_step_ratio: float = Field(8.0, gt=1)
    """Maximum time of a step with prompt tokens, in steps without any, for chunked_prefill_size
    auto."""
    max_inter_token_ms: float | None = Field(None, gt=0)
    """Maximum time between the tokens of a request in ms, for chunked_prefill_size auto; null: no
    other bound than max_step_ratio."""
    max_waiting_seqs: int = Field(1024, ge=1, le=1 << 20)
    """Maximum number of sequences waiting in one engine; further ones are rejected."""

    @field_validator("chunked_prefill_size", mode="before")
    @classmethod
    def _is_a_chunk(cls, size: object) -> object:
        is_number = isinstance(size, int) and not isinstance(size, bool) and size >= 1
        if is_number or size is None or size == "auto":
            return size
        fix = "use auto, a number of tokens from 1, or null for prompts that are not split"
        raise Refusal("chunked_prefill_size", size, fix)

    @model_validator(mode="after")
    def _has_one_bound(self) -> Self:
        """Refuse bounds of steps together with a chunk that does not follow them."""
        size = self.chunked_prefill_size
        if size == "auto":
            return self
        for name in ("max_inter_token_ms", "max_step_ratio"):
            value = getattr(self, name)
            if name in self.model_fields_set and value is not None:
                fix = f"contradicts chunked_prefill_size={size!r}; leave one of them out"
                raise Refusal(name, value, fix)
        return self
