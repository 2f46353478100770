"""Makes one rank ready: device, its part of the weights, proposer, KV cache, warm-up. The result is the runner and
what others must know of it."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, DecodeBounds
from kvasir_runtime.attention.select import check_readable
from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig
from kvasir_runtime.errors import ConfigurationError, GrammarError
from kvasir_runtime.execution.description import RankDescription
from kvasir_runtime.execution.device import select_device, select_dtype, usable_cores
from kvasir_runtime.execution.encoder_worker import check_encoder_can, load_encoder
from kvasir_runtime.execution.executor import PrepareGrammar, StepRunner
from kvasir_runtime.execution.kv_buffer import SequenceLimits, num_kv_blocks
from kvasir_runtime.execution.limits import (
    check_weights_fit,
    fitted_max_model_len,
    resolve_max_model_len,
    resolve_max_num_batched_tokens,
)
from kvasir_runtime.execution.memory_profile import memory_before_loading
from kvasir_runtime.execution.pipeline import Pipeline, join_pipeline
from kvasir_runtime.execution.platform import Platform, platform_of
from kvasir_runtime.execution.pooling import Pooler
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.runner_assembly import RunnerAssembly
from kvasir_runtime.execution.startup import LoadingProgress, StartupTimer
from kvasir_runtime.execution.synthetic_steps import (
    ADJUSTED,
    DEMANDING,
    GREEDY,
    RANDOM,
    decode_step,
    pooling_step,
    prefill_step,
    run,
)
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.attention_tiles import SPLIT_UNIT_KEYS
from kvasir_runtime.kernels.grouped_linear import make_grouped_weight
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kernels.linear_choice import make_weight
from kvasir_runtime.kv_cache.spec import KvSpec, make_layout
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.checkpoint_names import names_in
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.models.families import generating_architecture, read_options
from kvasir_runtime.models.hf_config import HuggingFaceConfig, read_config
from kvasir_runtime.models.loader import load_decoder
from kvasir_runtime.models.mixture_of_experts import check_has_experts
from kvasir_runtime.models.options import DecoderOptions
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.models.tensor_parallel import own_heads
from kvasir_runtime.parallel.collectives import SingleRank
from kvasir_runtime.parallel.groups import RankGroups, alone
from kvasir_runtime.parallel.stage import Stage
from kvasir_runtime.pooling.description import PoolingDescription, describe_pooling
from kvasir_runtime.pooling.head import Head, load_decoder_head
from kvasir_runtime.speculative.proposer import Proposer
from kvasir_runtime.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

ProposerFactory = Callable[[Decoder, Placement, AttentionBackend, int], Proposer]
"""Makes the proposer for a target decoder, where it is placed, its attention backend, and for max_model_len."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A rank that is ready to run steps."""

    runner: StepRunner
    description: RankDescription
    prepare_thread: Callable[[], None]
    """To be called on the thread that runs steps: which device is current, and how many cores a kernel uses, are a
    thread's own settings."""
    prepare_grammar: PrepareGrammar | None = None
    """None: no request of its model has a grammar."""


MakeVocabulary = Callable[[int], Vocabulary]
"""For a model with so many logits."""


NUM_GRAMMAR_THREADS = 2
"""One grammar may take a second to be made: others need not wait for it."""


class AwaitedVocabulary:
    """Made on a thread of its own, while the first requests come. Such threads then make matchers ahead of steps."""

    def __init__(self, make: Callable[[], Vocabulary] | None) -> None:
        self._make = make
        self._made: Future[Vocabulary] = Future()
        self._preparing = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, "grammars")  # which go with it

    def begin(self) -> None:
        threading.Thread(target=self._run, name="vocabulary", daemon=True).start()

    def __call__(self) -> Vocabulary:
        """Wait for it. Raises what making it raised."""
        return self._made.result()

    def prepare(self, grammar: str) -> Future[None]:
        return self._preparing.submit(self._prepare, grammar)

    def _prepare(self, grammar: str) -> None:
        try:
            self().matcher(grammar)
        except Exception as error:  # is raised again where the request's row begins
            logger.debug("a grammar cannot be prepared: %s", error)

    def _run(self) -> None:
        try:
            if self._make is None:
                raise GrammarError("this engine was started without a vocabulary")
            self._made.set_result(self._make())
        except Exception as error:
            self._made.set_exception(error)


def load_worker(
    model: ModelConfig,
    cache: CacheConfig,
    execution: ExecutionConfig,
    scheduler: SchedulerConfig,
    make_proposer: ProposerFactory | None = None,
    groups: RankGroups | None = None,
    platform: Platform | None = None,
    make_vocabulary: MakeVocabulary | None = None,
) -> Worker:
    """Load this rank's part of the model and take the memory for its KV cache. Raises ConfigurationError,
    ModelLoadError.

    `make_vocabulary` is called on a thread of its own once the rank is ready; without it grammars are refused.
    `groups` are the rank's, None where it is alone; `platform` is the device's own where it is None. All ranks load at
    the same time: they agree on the number of blocks, and their first steps need each other.
    """
    timer = StartupTimer()
    groups = alone() if groups is None else groups
    place, num_sharers = groups.place, groups.place.topology.local_world_size
    stage = Stage(place.pipeline_rank, place.pipeline_size, place.topology.layer_partition)
    device = select_device(model.device, place)
    platform = platform or platform_of(device)
    num_threads = execution.num_threads or max(1, usable_cores() // num_sharers)
    torch.set_num_threads(num_threads)
    pooling = describe_pooling(model)
    if pooling is not None and make_proposer is not None:
        raise ConfigurationError(
            "--speculative-config is for models that generate, but this one makes vectors; leave it out, or pass "
            "--runner generate"
        )
    config = read_config(Path(model.model), model.hf_overrides)
    if pooling is not None and pooling.is_encoder:
        check_encoder_can(place.topology, cache)
        placement = _placement(model, config, execution, platform, timer, groups)
        encoder, description = load_encoder(model, cache, scheduler, config, pooling, placement, timer)
        return Worker(
            runner=encoder, description=description, prepare_thread=partial(_prepare_thread, device, num_threads)
        )
    options = _options(config, pooling)
    if place.topology.expert_parallel:
        check_has_experts(options)
    make = None if make_vocabulary is None else partial(make_vocabulary, options.vocab_size)
    vocabulary = AwaitedVocabulary(make)
    max_model_len = resolve_max_model_len(options, _wanted_length(model, options, pooling))
    max_drafts = _max_drafts(execution) if make_proposer is not None else 0
    budget = resolve_max_num_batched_tokens(scheduler, device, max_model_len, max_drafts)
    limits = SequenceLimits(scheduler.max_num_seqs, max_model_len, budget)
    placement = _placement(model, config, execution, platform, timer, groups)
    backend = platform.attention_backend(
        execution.attention_backend, DecodeBounds(scheduler.max_num_seqs, 1 + max_drafts), cache.kv_cache_dtype
    )
    fitted = partial(fitted_max_model_len, cache, is_wanted=model.max_model_len is not None)
    expected = _expected_specs(options, stage, placement, cache)
    check_readable(backend.name, expected)
    weight_bytes = _weight_bytes(Path(model.model), options, placement.dtype) // place.topology.num_ranks
    memory = memory_before_loading(device, weight_bytes, num_sharers)
    check_weights_fit(cache, memory, weight_bytes, placement.dtype)
    layout = make_layout(expected, cache.block_size)
    limits = replace(limits, max_model_len=groups.least(fitted(layout, memory, limits)))
    with timer.measure("load_weights"):
        with Checkpoint(Path(model.model)) as checkpoint:
            pooler = None if pooling is None else _pooler(pooling, checkpoint, options, placement)
            drafts_embed = stage.is_last and _drafts_embed(execution)
            decoder = load_decoder(
                checkpoint,
                options,
                placement,
                limits.max_model_len,
                stage,
                drafts_embed=drafts_embed,
                has_head=pooling is None,
                over_layers=LoadingProgress(place.name, place.topology.num_ranks, options.num_layers).over,
            )
        proposer = None
        if make_proposer is not None and stage.is_last:  # it goes on from what is drawn
            whole = replace(placement, tensor=SingleRank())  # a proposer is small: each rank has all of it
            proposer = make_proposer(decoder, whole, backend, limits.max_model_len)
    with timer.measure("allocate_kv"):
        kv_specs = [spec.as_cached(cache.kv_cache_dtype) for spec in decoder.kv_specs(placement.dtype)]
        kv_specs += () if proposer is None else proposer.kv_specs
        assembly = RunnerAssembly(
            decoder=decoder,
            proposer=proposer,
            placement=placement,
            platform=platform,
            backend=backend,
            step_ops=platform.step_ops(),
            kv_specs=kv_specs,
            block_size=cache.block_size,
            limits=limits,
            max_drafts=max_drafts,
            least=groups.least_of_stage,
            vocabulary=vocabulary,
            pooler=pooler,
            pipeline=_pipeline(stage, groups, kv_specs, proposer),
        )
        memory = platform.memory(assembly.runner, limits, max_drafts, num_sharers, pooling is not None)
        limits = replace(limits, max_model_len=groups.least(fitted(assembly.layout, memory, limits)))
        assembly = replace(assembly, limits=limits)
        num_blocks = groups.least(num_kv_blocks(cache, assembly.layout, memory, limits))
        # Ranks that capture together must run out of memory for it together.
        runner = assembly.runner(num_blocks, groups.least_of_stage(memory.graph_bytes))
    with timer.measure("warm_up"):
        if pooling is None:
            _warm_up(runner, limits, max_drafts)
        else:
            run(runner, pooling_step([min(2, limits.max_model_len)]))
    description = RankDescription(
        layout=assembly.layout,
        kv_specs=tuple(kv_specs),
        num_blocks=num_blocks,
        max_model_len=limits.max_model_len,
        max_model_len_cut_from=None if limits.max_model_len == max_model_len else max_model_len,
        max_num_batched_tokens=budget,
        vocab_size=options.vocab_size,
        attention_backend=assembly.backend.name,
        device=str(device),
        startup_seconds=timer.seconds,
    )
    if pooling is None:
        vocabulary.begin()
    return Worker(
        runner=runner,
        description=description,
        prepare_thread=partial(_prepare_thread, device, num_threads),
        prepare_grammar=vocabulary.prepare if pooling is None else None,
    )


def _placement(
    model: ModelConfig,
    config: HuggingFaceConfig,
    execution: ExecutionConfig,
    platform: Platform,
    timer: StartupTimer,
    groups: RankGroups,
) -> Placement:
    return Placement(
        device=platform.device,
        dtype=select_dtype(model.dtype, config.dtype),
        ops=platform.ops(),
        make_weight=partial(_measured_weight, timer, execution),
        make_grouped_weight=partial(
            make_grouped_weight, path=execution.linear_path, batch_invariant=execution.batch_invariant
        ),
        tensor=groups.tensor,
        expert_parallel=groups.place.topology.expert_parallel,
    )


def _options(config: HuggingFaceConfig, pooling: PoolingDescription | None) -> DecoderOptions:
    """Of a pooling model those of the generating one whose layers it has."""
    if pooling is None:
        return read_options(config)
    return read_options(config, generating_architecture(pooling.architecture))


def _wanted_length(model: ModelConfig, options: DecoderOptions, pooling: PoolingDescription | None) -> int | None:
    """The flag's, else how far a pooling model was trained."""
    if model.max_model_len is not None or pooling is None or pooling.inputs.max_tokens is None:
        return model.max_model_len
    return min(pooling.inputs.max_tokens, options.max_exact_length)


def _pooler(
    pooling: PoolingDescription, checkpoint: Checkpoint, options: DecoderOptions, placement: Placement
) -> Callable[[Rows, Transfers], Pooler]:
    """Made for the rows of each runner. Raises CheckpointError."""
    names = names_in(checkpoint, options.architecture)
    head: Head = load_decoder_head(pooling, checkpoint, options, names, placement.device)
    return lambda rows, transfers: Pooler(rows, transfers, pooling, head, options.hidden_size)


def _expected_specs(options: DecoderOptions, stage: Stage, placement: Placement, cache: CacheConfig) -> list[KvSpec]:
    """What the target's layers on this rank will keep, before they are loaded."""
    layers = [options.layers[i] for i in stage.layers(options.num_layers)]
    specs = [s for each in layers for s in own_heads(each.attention, placement.tensor).kv_specs(placement.dtype)]
    return [spec.as_cached(cache.kv_cache_dtype) for spec in specs]


def _weight_bytes(folder: Path, options: DecoderOptions, dtype: torch.dtype) -> int:
    """Of the whole model as `dtype`; a tied embedding counts once, even where the checkpoint has it twice."""
    with Checkpoint(folder) as checkpoint:
        head = f"{names_in(checkpoint, options.architecture).head}.weight" if options.tie_word_embeddings else None
        return checkpoint.num_values(ignored=head) * dtype.itemsize


def _prepare_thread(device: torch.device, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    if device.index is not None:
        torch.cuda.set_device(device)


def _max_drafts(execution: ExecutionConfig) -> int:
    return 0 if execution.speculative_config is None else execution.speculative_config.num_speculative_tokens


def _drafts_embed(execution: ExecutionConfig) -> bool:
    """Whether drafts are made with the target's embedding."""
    speculative = execution.speculative_config
    return speculative is not None and speculative.method in ("eagle", "eagle3")


def _pipeline(stage: Stage, groups: RankGroups, specs: list[KvSpec], proposer: Proposer | None) -> Pipeline | None:
    """None where this is the only stage."""
    if groups.link is None:
        return None
    return join_pipeline(stage, groups.link, specs, () if proposer is None else proposer.captured_layers)


def _measured_weight(timer: StartupTimer, execution: ExecutionConfig, weight: Tensor, bias: Tensor | None) -> Linear:
    """Most of the time goes into measuring compute paths."""
    with timer.measure("measure_linear"):
        return make_weight(weight, bias, path=execution.linear_path, batch_invariant=execution.batch_invariant)


def _warm_up(runner: StepRunner, limits: SequenceLimits, max_drafts: int) -> None:
    """Run every kernel that serving runs: a prefill, decodes with and without all that sampling can do, both in one
    step, and decodes of keys enough to be split, with drafts and without."""
    length = min(2, limits.max_model_len)
    num_drafts = min(max_drafts, limits.max_model_len - 1, limits.max_num_batched_tokens - 1)
    for sampling in (GREEDY, DEMANDING):
        run(runner, prefill_step([length], sampling, max_drafts))
        run(runner, decode_step(1, num_drafts, length, sampling))
    if limits.max_num_seqs > 1:
        run(runner, decode_step(2, 0, length, GREEDY, DEMANDING))
    long = min(2 * SPLIT_UNIT_KEYS, limits.max_model_len)
    for drafts in (0, min(num_drafts, long - 1)):
        for sampling in (ADJUSTED, RANDOM):
            run(runner, decode_step(1, drafts, long, sampling))
