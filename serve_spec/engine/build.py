"""Build an engine from a configuration: load models, size KV caches, capture draft shapes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from serve_spec.adaptive import AdaptiveController, PolicySettings
from serve_spec.adaptive.prompts import PromptLimits
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.drafts import METHODS
from serve_spec.config.speculative import ignored_adaptive_keys
from serve_spec.core.draft import MAX_TREE_TOKENS, PLAIN, ModelDrafts, NgramDrafter
from serve_spec.core.errors import BrokenLogits, CheckpointError
from serve_spec.core.registry import load_plugins
from serve_spec.core.request import SamplingParams
from serve_spec.core.round import RoundSteps
from serve_spec.core.sequence import Sequence
from serve_spec.engine.engine import SpecEngine, freeze_gc
from serve_spec.engine.inputs import EngineLimits, sampling_defaults
from serve_spec.engine.policy_cache import PolicyCache, policy_file
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.kvcache.manager import KVCacheManager
from serve_spec.kvcache.memory import CacheMemory
from serve_spec.kvcache.pool import FeaturePool, PagedKVPool, check_caches
from serve_spec.log import get_logger, stage
from serve_spec.models.decoder import compile_layers
from serve_spec.models.drafts.base import DraftOptions
from serve_spec.models.drafts.loader import draft_dtype, draft_weights, load_draft
from serve_spec.models.interfaces import DraftModel, Target
from serve_spec.models.kv_cache import cache_dtype, store_in
from serve_spec.models.loader import load_target, quantized_formats, read_spec, target_dtype
from serve_spec.parallel.group import SINGLE, TensorParallel
from serve_spec.parallel.worker_ranks import Launcher, WorkerRanks, launch
from serve_spec.profile.measure import (
    CostGrid,
    Measurement,
    ProfileLimits,
    TimeBudget,
    measure_costs,
    plain_step_ms,
)
from serve_spec.profile.source import Clock, CostSource, cost_key
from serve_spec.scheduler.scheduler import Scheduler
from serve_spec.structured.compiler import GrammarCompiler
from serve_spec.structured.masks import Grammars
from serve_spec.worker.drafters.base import DraftMemory, drafter_class
from serve_spec.worker.forward import TargetRunner
from serve_spec.worker.graphs import GraphRecorder, batch_sizes, token_counts
from serve_spec.worker.request_slots import RequestSlots
from serve_spec.worker.tensor_parallel import TensorParallelWorker
from serve_spec.worker.trace import name_layers
from serve_spec.worker.worker import SpecWorker, WorkerSettings

logger = get_logger(__name__)

_FIRST_PROMPT = "The quick brown fox"
_MOST_PROMPT_TOKENS = 4
_PROFILE_BUDGET_S = {"cpu": 10.0, "cuda": 20.0}
"""Seconds that measuring a cost table may take."""


def build_engine(config: ServeSpecConfig, launcher: Launcher | None = None) -> SpecEngine:
    """Load target, draft and tokenizer, and return an engine that is ready for requests.

    With tensor parallelism this process is rank 0. It starts the other ranks, which
    `SpecEngine.shutdown` ends. launcher: where they run; None: as processes of this host.
    Raises CheckpointError, ConfigError for sizes that do not fit together, RankLost.
    """
    if config.model.tensor_parallel_size == 1:
        return _build_engine(config, SINGLE, None)
    worker_ranks = _start_ranks(config, launcher)
    try:
        with worker_ranks.in_step():
            parallel = worker_ranks.join(rank_device(config, 0))
            return _build_engine(config, parallel, worker_ranks)
    except BaseException:
        worker_ranks.stop()
        raise


def _start_ranks(config: ServeSpecConfig, launcher: Launcher | None) -> WorkerRanks:
    size = config.model.tensor_parallel_size
    read_spec(config.model.metadata_folder, size)
    is_on_gpu = rank_device(config, 0).type == "cuda"
    if launcher is None and is_on_gpu and torch.cuda.device_count() < size:
        why = f"tensor_parallel_size={size}: torch sees {torch.cuda.device_count()} GPUs here"
        raise ConfigError(f"{why}; lower it, or show more of them (CUDA_VISIBLE_DEVICES)")
    return launch("serve_spec.engine.worker_rank", size, config, launcher)


def _build_engine(
    config: ServeSpecConfig, parallel: TensorParallel, worker_ranks: WorkerRanks | None
) -> SpecEngine:
    tokenizer = Tokenizer(config.model.tokenizer_folder)
    check_fit(config, tokenizer)
    with stage("loading the weights"):
        loaded = load_models(config, parallel)
    target, num_pages = loaded.target, loaded.num_pages
    if ignored := ignored_adaptive_keys(config.speculative):
        logger.warning(ignored)
    policy = _policy(config, loaded)
    max_model_len = target.max_model_len
    _check_sizes(config, policy, num_pages, max_model_len)
    worker = build_worker(
        config,
        loaded,
        SpecWorker if worker_ranks is None else partial(TensorParallelWorker, worker_ranks),
    )
    with stage("preparing the draft shapes (CUDA graphs on a GPU)"):
        worker.init_states(policy.shapes)
    _check_first_logits(config, loaded, worker, tokenizer.encode(_FIRST_PROMPT)[:max_model_len])
    cache = KVCacheManager(
        num_pages, config.cache.page_size, prefix_caching=config.cache.prefix_caching
    )
    costs = _cost_source(config, worker, policy, cache)
    with stage("measuring or reading the costs of steps"):
        table = costs.obtain() if policy.needs_costs else None
    _check_bound(config, worker)
    if _captures_graphs(config, loaded.device):
        policy = _with_captured_sizes(policy, worker, config.scheduler.max_num_seqs)
    controller = AdaptiveController(policy, table, logger.warning)
    policy_cache = _policy_cache(config, costs, controller)
    ngrams: NgramDrafter | None = None
    if (algorithm := config.speculative.ngram_algorithm) is not None:
        create = METHODS[algorithm].load()
        ngrams = create(config.speculative, tokenizer.encode, policy.max_depth)
    if loaded.device.type == "cuda":
        freeze_gc()
    return SpecEngine(
        _scheduler(config, worker, cache, ngrams),
        worker,
        controller,
        tokenizer,
        EngineLimits(
            vocab_size=worker.vocab_size,
            num_ids=worker.vocab_size if target.spec.num_ids is None else target.spec.num_ids,
            eos_token_ids=tuple(sorted(target.spec.eos_token_ids)),
            max_model_len=max_model_len,
            forces_acceptance=worker.settings.synthetic_acceptance is not None,
        ),
        worker_ranks,
        costs,
        policy_cache,
    )


def _check_bound(config: ServeSpecConfig, worker: SpecWorker) -> None:
    """Raise ConfigError for a bound that the shortest step does not keep."""
    bound = config.scheduler.max_inter_token_ms
    if bound is None:
        return
    ms = plain_step_ms(worker, config.cache.page_size)
    if ms > bound:
        raise ConfigError(
            f"max_inter_token_ms={bound}: no step can hold it; one of a single request without "
            f"drafts or prompts takes {ms:.3g} ms here; raise it above that"
        )


def _check_first_logits(
    config: ServeSpecConfig, loaded: LoadedModels, worker: SpecWorker, prompt: list[int]
) -> None:
    """Run a short prompt and one step with drafts. Broken draft logits only give a warning.

    Raises CheckpointError: the target's logits are broken. RankLost: another rank failed first.
    """
    scheduler = _scheduler(config, worker, KVCacheManager(loaded.num_pages, config.cache.page_size))
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    token_ids = prompt[:_MOST_PROMPT_TOKENS] or [0]
    seq = Sequence("first logits", params, token_ids, len(token_ids), seed=0)
    shapes = sorted(shape for shape in worker.states if shape.is_chain and shape != PLAIN)
    shape = shapes[0] if shapes and loaded.head is not None else PLAIN
    scheduler.queue.add(seq)
    for _ in range(2):  # the prompt, then the drafts
        plan = scheduler.plan(
            lambda batch: RoundSteps(shape if batch.size else PLAIN), worker.max_missing
        )
        assert plan is not None, "one short prompt always fits"
        result = worker.execute(plan)
        if result.broken_logits:
            raise CheckpointError(f"{config.model.path}: {BrokenLogits()}")
        scheduler.commit(plan, result, lambda seq, token_ids: (len(token_ids), None))
    if seq.has_broken_draft:
        logger.warning(
            "%s: draft model produced NaN logits, its drafts are not used; check the checkpoint "
            "or use speculative_draft_dtype=float32",
            config.speculative.speculative_draft_model_path,
        )
    scheduler.queue.abort(seq.request_id)


def _scheduler(
    config: ServeSpecConfig,
    worker: SpecWorker,
    cache: KVCacheManager,
    ngrams: NgramDrafter | None = None,
) -> Scheduler:
    drafter = worker.drafter
    return Scheduler(
        config.scheduler,
        cache,
        ngram_drafter=ngrams,
        model_drafts=None
        if drafter is None
        else ModelDrafts(drafter.slots_past, drafter.first_entry),
        vocab_size=worker.vocab_size,
        grammar_limits=worker.grammar_limits,
    )


def _with_captured_sizes(
    policy: PolicySettings, worker: SpecWorker, max_num_seqs: int
) -> PolicySettings:
    deepest = worker.states[max(shape for shape in worker.states if shape.is_chain)]
    counts = [size.tokens for size in deepest.verify.sizes]
    # Of batches without graphs, budgets are weighed at the same distances.
    most = min(max_num_seqs * (deepest.shape.size + 1), worker.settings.max_tokens)
    counts += [count for count in token_counts(most) if counts and count > counts[-1]]
    mixed = [size.tokens for size in next(iter(worker.stages.mixed.values())).sizes]
    return replace(
        policy,
        cuda_graph_bs=batch_sizes(max_num_seqs),
        token_counts=counts,
        prompts=replace(policy.prompts, token_counts=mixed),
    )


@dataclass(frozen=True)
class LoadedModels:
    """The models of one rank, and the number of KV pages, which is equal on all ranks."""

    target: Target
    head: DraftModel | None
    num_pages: int
    device: torch.device
    parallel: TensorParallel


def load_models(config: ServeSpecConfig, parallel: TensorParallel) -> LoadedModels:
    """Load a rank's shard of the target, and the draft; raise CheckpointError or ConfigError."""
    load_plugins()
    device = rank_device(config, parallel.rank)
    if config.model.torch_compile and device.type == "cpu":
        raise ConfigError(
            "torch_compile=True: torch's compiler does not support the oneDNN products used on "
            "CPUs; set it to false, or device to 'cuda'"
        )
    dtype = target_dtype(config.model.dtype, config.model.folder, device)
    stored_in = cache_dtype(config.model.kv_cache_dtype, config.model.folder, dtype, device)
    if config.replica.torch_num_threads is not None:
        torch.set_num_threads(config.replica.torch_num_threads)
    target = load_target(
        config.model.folder,
        dtype,
        device,
        config.model.max_model_len,
        parallel,
        load_format=config.model.load_format,
        formats=quantized_formats(config.model.quantization, config.model.folder, device),
    )
    store_in(stored_in, target)
    head = _load_head(config, target)
    if config.model.torch_compile:
        compile_layers(target)
        if head is not None:
            compile_layers(head)
    name_layers(target, "target")
    if head is not None:
        name_layers(head, "draft")
    num_pages = parallel.smallest(_num_pages(config, target, head))
    return LoadedModels(target, head, num_pages, device, parallel)


W = TypeVar("W", bound=SpecWorker)


def build_worker(config: ServeSpecConfig, loaded: LoadedModels, create: Callable[..., W]) -> W:
    """Return one rank's worker, without captured shapes yet. create: its class."""
    target, head = loaded.target, loaded.head
    device, num_pages, page_size = loaded.device, loaded.num_pages, config.cache.page_size
    features = drafter = None
    if head is not None:
        num_slots = (num_pages + 1) * page_size
        features = FeaturePool(num_slots, head.feature_dim, target.dtype, device)
        pool = PagedKVPool(head.caches, num_pages, page_size, head.dtype, device)
        max_requests = config.scheduler.max_num_seqs
        drafter = drafter_class(head)(head, DraftMemory(pool, features, max_requests))
    runner = TargetRunner(
        target,
        PagedKVPool(target.spec.caches, num_pages, page_size, target.dtype, device),
        capture=head.capture if head else None,
        features=features if head and head.feature_dim else None,
    )
    # Two steps in flight may write past the end of a text: all drafts of one, and the accepted
    # ones of the other.
    max_pages = -(-(target.max_model_len + 2 * MAX_TREE_TOKENS) // page_size)
    vocab_size, eos_token_ids = target.spec.vocab_size, target.spec.eos_token_ids
    slots = RequestSlots(
        config.scheduler.max_num_seqs, max_pages, runner.pool.scratch_page, vocab_size, device
    )
    compiler = GrammarCompiler(
        lambda: Tokenizer(config.model.tokenizer_folder).describe(vocab_size),
        vocab_size,
        eos_token_ids,
        target.spec.num_ids,
    )
    if loaded.parallel.rank == 0:  # which alone makes masks
        compiler.prepare()
    policy = _policy(config, loaded)
    asynchronous = config.model.async_scheduling
    return create(
        runner,
        drafter,
        slots,
        GraphRecorder(device) if _captures_graphs(config, device) else None,
        Grammars(compiler),
        WorkerSettings(
            max_tokens=config.scheduler.max_num_batched_tokens,
            largest_batch=policy.largest_batch,
            async_scheduling=device.type == "cuda" if asynchronous is None else asynchronous,
            synthetic_acceptance=config.speculative.synthetic_acceptance,
            rejection_sample_method=config.speculative.rejection_sample_method,
            draft_sharpness=config.speculative.speculative_draft_sharpness,
            max_captured=config.model.cuda_graph_max_bs,
        ),
        loaded.parallel,
    )


def _captures_graphs(config: ServeSpecConfig, device: torch.device) -> bool:
    return device.type == "cuda" and config.model.cuda_graphs


def rank_device(config: ServeSpecConfig, rank: int) -> torch.device:
    """Return the device of a rank: a GPU of its own, or the host's CPU."""
    name = config.model.device
    has_gpu = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("device='cuda': torch sees no GPU here; use device='cpu' or 'auto'")
    if not has_gpu or config.model.tensor_parallel_size == 1:
        return torch.device("cuda" if has_gpu else "cpu")
    # A process that sees one GPU calls it 0, whatever its rank.
    return torch.device("cuda", rank % torch.cuda.device_count())


def _cost_source(
    config: ServeSpecConfig, worker: SpecWorker, policy: PolicySettings, cache: KVCacheManager
) -> CostSource:
    key = cost_key(config, worker, policy.trees)
    grid = CostGrid(
        config.scheduler.max_num_seqs,
        policy.max_depth,
        {tree: policy.largest_batch(tree) for tree in policy.trees},
        every_step=worker.device.type == "cuda",
    )
    limits = ProfileLimits(
        cache.page_size,
        cache.num_pages,
        config.scheduler.max_num_batched_tokens,
        worker.target.model.max_model_len,
    )

    def measure(clock: Clock, longest_run_s: float) -> Measurement:
        budget = TimeBudget(_PROFILE_BUDGET_S[worker.device.type], clock, longest_run_s)
        return measure_costs(key, worker, grid, limits, budget, cache.unheld_pages)

    return CostSource(key, grid, path=config.speculative.speculative_cost_table, measure=measure)


def _policy_cache(
    config: ServeSpecConfig, costs: CostSource, controller: AdaptiveController
) -> PolicyCache | None:
    """Let the policy continue where the last engine of these settings stopped, if asked for."""
    speculative = config.speculative
    if not speculative.speculative_adaptive_cache or not speculative.speculative_adaptive:
        return None
    policy_cache = PolicyCache(controller, policy_file(costs.cached, speculative))
    policy_cache.restore()
    return policy_cache


def _load_head(config: ServeSpecConfig, target: Target) -> DraftModel | None:
    speculative, weight = config.speculative, target.embed_tokens.weight
    path = config.draft_folder if speculative.enabled else None
    if path is None:
        return None
    weights = draft_weights(speculative.speculative_draft_model_quantization, weight.device)
    draft_in = draft_dtype(
        speculative.speculative_draft_dtype, target.dtype, weight.device, weights
    )
    return load_draft(
        path,
        target,
        algorithm=speculative.speculative_algorithm,
        options=DraftOptions.of(speculative, config.model.load_format),
        dtype=draft_in,
        weights=weights,
    )


def _num_pages(config: ServeSpecConfig, target: Target, head: DraftModel | None) -> int:
    """Return the configured number of KV pages, or as many as fit the budget.

    Raises ConfigError if they need more memory than there is.
    """
    page_size, device = config.cache.page_size, target.embed_tokens.weight.device
    # A step verifies up to MAX_TREE_TOKENS tokens of a request; one slot more takes padding.
    ring, num_slots = MAX_TREE_TOKENS, config.scheduler.max_num_seqs + 1
    memory = CacheMemory.of(target.spec.caches, page_size, target.dtype, ring)
    if head is not None:
        memory += CacheMemory.of(head.caches, page_size, head.dtype, ring)
        memory += CacheMemory(per_page=page_size * head.feature_dim * target.dtype.itemsize)
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        budget = free_bytes * config.cache.memory_fraction
    else:
        free_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        budget = config.cache.cpu_cache_gb * 2**30
    num_pages = memory.most_pages(budget, num_slots)
    given = f"cpu_cache_gb={config.cache.cpu_cache_gb}"
    if config.cache.num_pages is not None:
        num_pages = config.cache.num_pages
        given = f"num_pages={num_pages}"
    needed = memory.total(num_pages, num_slots)
    if needed > free_bytes:
        raise ConfigError(
            f"{given}: the KV cache needs {needed / 2**30:.1f} GiB, but "
            f"there are {free_bytes / 2**30:.1f} GiB; lower it"
        )
    logger.info("KV cache: %d pages of %d tokens", num_pages, page_size)
    return num_pages


def check_fit(config: ServeSpecConfig, tokenizer: Tokenizer) -> None:
    """Raise for settings that do not fit the checkpoint, before weights are loaded."""
    spec = read_spec(config.model.metadata_folder)
    check_caches(spec.caches)
    max_model_len = config.model.max_model_len
    sampling_defaults(config.model)  # raises if they are invalid
    if config.model.load_format == "safetensors":
        for folder in filter(None, (config.model.folder, config.draft_folder)):
            if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
                why = f"load_format='safetensors': {folder} has none of them"
                raise CheckpointError(f"{why}; use 'auto' to read its pickles")
    if max_model_len is not None and max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the model was made for: "
            f"max_position_embeddings={spec.max_position_embeddings}; lower max_model_len"
        )
    topk = config.speculative.topk
    if config.speculative.enabled and topk > 1 and not spec.takes_trees:
        raise ConfigError(
            f"speculative_eagle_topk={topk}: trees of up to {MAX_TREE_TOKENS} tokens do not fit "
            f"the target's sliding_window={spec.window}; use speculative_eagle_topk=1"
        )
    # Added tokens may have no logits, as in checkpoints with a token for padding.
    if tokenizer.base_vocab_size > spec.vocab_size:
        raise CheckpointError(
            f"tokenizer.json has {tokenizer.base_vocab_size} tokens, config.json has "
            f"vocab_size={spec.vocab_size}: they are not of the same model; use its own tokenizer"
        )


def _policy(config: ServeSpecConfig, loaded: LoadedModels) -> PolicySettings:
    # On CPUs every verified token costs, and small trees were no faster than chains.
    adds_trees = loaded.device.type == "cuda" and loaded.target.spec.takes_trees
    most_steps = None if loaded.head is None else loaded.head.max_steps
    policy = PolicySettings.of(config.speculative, most_steps, may_branch=adds_trees)
    return replace(policy, prompts=PromptLimits(config.scheduler))


def _check_sizes(
    config: ServeSpecConfig, policy: PolicySettings, num_pages: int, max_model_len: int
) -> None:
    most, deepest = policy.max_steps, policy.max_depth
    if most is not None and deepest > most:
        raise ConfigError(
            f"speculative_num_steps={policy.shape.depth}, or the adaptive config: {deepest} steps, "
            f"but the draft supports at most {most}; lower them"
        )
    room = num_pages * config.cache.page_size
    if room < max_model_len:
        raise ConfigError(
            f"num_pages={num_pages} of page_size={config.cache.page_size} hold {room} tokens, "
            f"less than max_model_len={max_model_len}: raise num_pages (or cpu_cache_gb, "
            "memory_fraction) or lower max_model_len"
        )
    budget = config.scheduler.max_num_batched_tokens
    if config.scheduler.chunked_prefill_size is None and budget < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is below max_model_len={max_model_len} while "
            "chunked_prefill_size=null: no step could hold the longest prompt; raise it"
        )
