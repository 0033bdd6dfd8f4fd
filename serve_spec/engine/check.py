"""Check the checkpoints of a configuration from their headers, before anything is started."""

from __future__ import annotations

import torch

from serve_spec.adaptive import PolicySettings
from serve_spec.config import ServeSpecConfig
from serve_spec.config.cost_table import load_cost_table
from serve_spec.config.speculative import NO_DRAFT
from serve_spec.engine.build import check_fit
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.models.drafts.base import DraftOptions
from serve_spec.models.drafts.loader import check_draft, draft_dtype, draft_weights
from serve_spec.models.kv_cache import cache_dtype
from serve_spec.models.loader import check_target, quantized_formats, read_spec, target_dtype
from serve_spec.worker.drafters.base import drafter_class


def check_checkpoints(config: ServeSpecConfig) -> None:
    """Raise what loading would: CheckpointError, ConfigError or ValueError. Reads no weights."""
    _ = PolicySettings.of(config.speculative).shapes  # imports a policy of another package
    if config.speculative.enabled and config.speculative.speculative_cost_table is not None:
        load_cost_table(config.speculative.speculative_cost_table)
    folder = config.model.folder
    read_spec(folder, config.model.tensor_parallel_size)
    check_fit(config, Tokenizer(config.model.tokenizer_folder))
    device = torch.device("cpu") if config.model.device == "cpu" else None  # else maybe elsewhere
    quantized_formats(config.model.quantization, folder, device)
    cache_dtype(config.model.kv_cache_dtype, folder, None, device)
    target = check_target(folder, config.model.load_format)
    draft = config.draft_folder if config.speculative.enabled else None
    if draft is not None:
        options = DraftOptions.of(config.speculative, config.model.load_format)
        head = check_draft(draft, target, config.speculative.speculative_algorithm, options)
        drafter_class(head)  # imports a drafter of another package


def resolved_values(config: ServeSpecConfig) -> dict[str, str]:
    """Return what a start on this machine makes of settings that are `auto` or left out.

    Raises what loading would: ValueError for a draft format that the device lacks.
    """
    spec = read_spec(config.model.metadata_folder)
    device = _device(config.model.device)
    dtype = target_dtype(config.model.dtype, config.model.folder, device)
    limit = config.model.max_model_len or spec.max_position_embeddings
    values = {
        "device": device.type,
        "context": f"{limit} of {spec.max_position_embeddings} positions",
        "dtype": _name(dtype),
        "pages": _pages(config, device),
        "speculation": NO_DRAFT,
    }
    stored_in = cache_dtype(config.model.kv_cache_dtype, config.model.folder, dtype, None)
    if stored_in is not None:
        values["KV cache"] = _name(stored_in)
    if spec.num_experts:
        values["experts"] = f"{spec.num_chosen_experts} of {spec.num_experts} for every token"
    if config.speculative.enabled:
        policy = PolicySettings.of(config.speculative)
        depths = sorted({shape.depth for shape in policy.shapes})
        values["speculation"] = config.speculative.speculative_algorithm
        values["depths"] = f"{', '.join(map(str, depths))}; {len(policy.trees)} trees"
    if config.speculative.enabled and config.draft_folder is not None:
        if device.type == "cuda" and not torch.cuda.is_available():
            return {**values, "draft format": "as the GPU computes fastest"}
        weights = draft_weights(config.speculative.speculative_draft_model_quantization, device)
        asked = config.speculative.speculative_draft_dtype
        of_draft = draft_dtype(asked, dtype, device, weights)
        values["draft format"] = f"{weights} weights, computed in {_name(of_draft)}"
    return values


def _device(name: str) -> torch.device:
    """Return the device for `model.device`; a GPU that is asked for may be on another machine."""
    is_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if is_gpu else "cpu")


def _pages(config: ServeSpecConfig, device: torch.device) -> str:
    cache = config.cache
    if cache.num_pages is not None:
        return f"{cache.num_pages} of {cache.page_size} tokens"
    memory = f"memory_fraction={cache.memory_fraction}"
    if device.type == "cpu":
        memory = f"cpu_cache_gb={cache.cpu_cache_gb}"
    return f"as many of {cache.page_size} tokens as fit {memory}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
