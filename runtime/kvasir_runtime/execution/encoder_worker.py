"""Makes the one rank of an encoder ready.

It has no KV cache: the blocks that the scheduler counts for it stand for texts under way, and hold nothing.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from kvasir_runtime.config import CacheConfig, ModelConfig, SchedulerConfig
from kvasir_runtime.encoders.bidirectional import BidirectionalDecoder
from kvasir_runtime.encoders.families import read_encoder
from kvasir_runtime.encoders.loader import EncoderLoader, load_encoder_head
from kvasir_runtime.errors import ConfigurationError, ModelLoadError
from kvasir_runtime.execution.description import RankDescription
from kvasir_runtime.execution.encoder_runner import ComputeTexts, EncoderRunner
from kvasir_runtime.execution.limits import check_weights_fit, resolve_max_num_batched_tokens
from kvasir_runtime.execution.memory_profile import memory_before_loading
from kvasir_runtime.execution.startup import StartupTimer
from kvasir_runtime.execution.synthetic_steps import pooling_step, run
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kv_cache.spec import KvSpec, make_layout
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.checkpoint_names import names_in
from kvasir_runtime.models.families import generating_architecture, read_options
from kvasir_runtime.models.hf_config import HuggingFaceConfig
from kvasir_runtime.models.loader import load_decoder
from kvasir_runtime.models.module_loader import RopeTables
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.parallel.topology import Topology
from kvasir_runtime.pooling.description import ENCODERS, PoolingDescription
from kvasir_runtime.pooling.head import Head, load_decoder_head

_COUNTED = KvSpec(num_kv_heads=1, key_dim=1, value_dim=1, dtype="uint8", itemsize=1)
_STEPS_OF_BLOCKS = 4
"""Blocks for so many of the largest steps: those under way, and one that is planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEncoder:
    compute: ComputeTexts
    head: Head
    """What follows the pooling."""
    vocab_size: int
    max_length: int


def check_encoder_can(topology: Topology, cache: CacheConfig) -> None:
    """Raises ConfigurationError for what needs a KV cache, or several ranks."""
    if topology.num_ranks > 1:
        raise ConfigurationError(
            f"this model is an encoder, which one rank computes, but --tensor-parallel-size {topology.tensor_size} and "
            f"--pipeline-parallel-size {topology.pipeline_size} ask for {topology.num_ranks}; leave them out, or raise "
            "--data-parallel-size instead"
        )
    if cache.kv_transfer_config is not None:
        raise ConfigurationError(
            "--kv-transfer-config: this model is an encoder and keeps no KV that could be exchanged; leave it out"
        )


def load_encoder(
    model: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    config: HuggingFaceConfig,
    pooling: PoolingDescription,
    placement: Placement,
    timer: StartupTimer,
) -> tuple[EncoderRunner, RankDescription]:
    """Raises ConfigurationError, ModelLoadError."""
    with timer.measure("load_weights"):
        loaded = _load(model, cache, config, pooling, placement)
    whole_texts = replace(scheduler, enable_chunked_prefill=False)
    budget = resolve_max_num_batched_tokens(whole_texts, placement.device, loaded.max_length, max_drafts=0)
    runner = EncoderRunner(loaded.compute, pooling, loaded.head, Transfers(placement.device))
    with timer.measure("warm_up"):
        run(runner, pooling_step([min(2, loaded.max_length)]))
    description = RankDescription(
        layout=make_layout([_COUNTED], cache.block_size),
        kv_specs=(_COUNTED,),
        num_blocks=_STEPS_OF_BLOCKS * (-(-budget // cache.block_size) + scheduler.max_num_seqs),
        max_model_len=loaded.max_length,
        max_num_batched_tokens=budget,
        vocab_size=loaded.vocab_size,
        attention_backend="bidirectional",
        device=str(placement.device),
        startup_seconds=timer.seconds,
        computes_whole_prompts=True,
    )
    return runner, description


def _load(
    model: ModelConfig,
    cache: CacheConfig,
    config: HuggingFaceConfig,
    pooling: PoolingDescription,
    placement: Placement,
) -> LoadedEncoder:
    with Checkpoint(Path(model.model)) as checkpoint:
        weight_bytes = checkpoint.num_values() * placement.dtype.itemsize
        check_weights_fit(cache, memory_before_loading(placement.device, weight_bytes), weight_bytes, placement.dtype)
        load = _load_own if pooling.architecture.startswith(ENCODERS) else _load_decoder
        return load(model, config, pooling, placement, checkpoint)


def _load_own(
    model: ModelConfig,
    config: HuggingFaceConfig,
    pooling: PoolingDescription,
    placement: Placement,
    checkpoint: Checkpoint,
) -> LoadedEncoder:
    """Of a family of encoders."""
    options, names = read_encoder(config, pooling.architecture)
    if config.object("quantization_config").values:
        raise ModelLoadError(
            f"{config.path}: quantized checkpoints are not supported; use the model in bf16, fp16 or fp32"
        )
    max_length = _max_length(options.max_length, model, pooling)
    activation = config.text("classifier_activation", "gelu")
    head = load_encoder_head(pooling, checkpoint, options, activation, placement.device)
    loader = EncoderLoader(
        checkpoint=checkpoint,
        options=options,
        names=names,
        placement=placement,
        ropes=RopeTables(max_length, placement.device),
    )
    return LoadedEncoder(compute=loader.encoder(), head=head, vocab_size=options.vocab_size, max_length=max_length)


def _load_decoder(
    model: ModelConfig,
    config: HuggingFaceConfig,
    pooling: PoolingDescription,
    placement: Placement,
    checkpoint: Checkpoint,
) -> LoadedEncoder:
    """Of a family of decoders whose tokens see those behind them."""
    as_decoder = replace(config, values={**config.values, "use_bidirectional_attention": False})
    options = read_options(as_decoder, generating_architecture(pooling.architecture))
    has_windows = any(layer.attention.window is not None for layer in options.layers)
    if has_windows and not config.flag("use_bidirectional_attention", False):
        raise ModelLoadError(
            f"{config.path}: is_causal is false and some layers see a window; which of it lies behind a token is not "
            "known, so only layers that see all are computed so"
        )
    max_length = _max_length(options.max_exact_length, model, pooling)
    names = names_in(checkpoint, options.architecture)
    head = load_decoder_head(pooling, checkpoint, options, names, placement.device)
    decoder = load_decoder(checkpoint, options, placement, max_length, has_head=False)
    return LoadedEncoder(
        compute=BidirectionalDecoder(decoder, placement.dtype),
        head=head,
        vocab_size=options.vocab_size,
        max_length=max_length,
    )


def _max_length(most: int, model: ModelConfig, pooling: PoolingDescription) -> int:
    """The flag's, else how far the model was trained. Raises ConfigurationError."""
    wanted = model.max_model_len
    if wanted is not None and not 1 <= wanted <= most:
        raise ConfigurationError(f"--max-model-len {wanted}: expected 1 to {most}, the positions that the model has")
    return min(most, pooling.inputs.max_tokens or most) if wanted is None else wanted
