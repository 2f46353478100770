"""The engine core's process from inside: load the model, say that it is ready, step until told to stop.

Its last word on a failure is `EngineFailed` to every API process.
"""

import gc
import logging
import sys
from functools import partial
from pathlib import Path

import torch

from kvasir_runtime.config import ExecutionConfig, RuntimeConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.engine.channel import CoreChannel
from kvasir_runtime.engine.core import EngineCore
from kvasir_runtime.engine.messages import EngineFailed, EngineReady
from kvasir_runtime.errors import KvasirRuntimeError
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.execution.worker import ProposerFactory, Worker, load_worker
from kvasir_runtime.heartbeat import Heartbeats, beating, engine_heartbeats
from kvasir_runtime.logs import configure_logging
from kvasir_runtime.malloc import keep_freed_memory
from kvasir_runtime.scheduling.limits import SchedulerLimits
from kvasir_runtime.scheduling.scheduler import make_scheduler
from kvasir_runtime.speculative.depth import DepthPolicy, FixedDepth
from kvasir_runtime.speculative.select import make_proposer

logger = logging.getLogger(__name__)


def run_engine_core(config: RuntimeConfig, ipc_dir: Path) -> None:
    """The child's whole life."""
    configure_logging(config.server.log_level)
    channel = CoreChannel(ipc_dir, config.server.api_server_count)
    try:
        _serve(config, channel, engine_heartbeats(ipc_dir, config.server.api_server_count))
    except KvasirRuntimeError as error:  # a cause that the user can mend: no stack
        channel.broadcast(EngineFailed(error=str(error)))
        sys.exit(1)
    except Exception as error:
        logger.exception("the engine core failed")
        channel.broadcast(EngineFailed(error=f"{type(error).__name__}: {error}"))
        sys.exit(1)
    finally:
        channel.close()


def _serve(config: RuntimeConfig, channel: CoreChannel, heartbeats: Heartbeats) -> None:
    worker = load_worker(config.model, config.cache, config.execution, config.scheduler, proposer_of(config.execution))
    with beating(heartbeats):  # from before anybody knows that it is ready
        channel.broadcast(_ready_message(config, worker))
        logger.info(
            "ready: %s on %s, attention %s, %d KV blocks of %d tokens, context %d; %s",
            config.model.model, worker.device, worker.attention_backend, worker.num_blocks, config.cache.block_size,
            worker.max_model_len,
            ", ".join(f"{name} {seconds:.2f} s" for name, seconds in worker.startup_seconds.items()),
        )  # fmt: skip
        _run(config, worker, channel)


def _run(config: RuntimeConfig, worker: Worker, channel: CoreChannel) -> None:
    gc.collect()
    gc.freeze()  # what loading left behind is not walked again in the middle of a step
    if worker.device.type == "cpu":
        keep_freed_memory()
    executor = Executor(worker.runner, worker.prepare_thread)
    try:
        engine_core(config, worker, executor, channel).run()
    finally:
        executor.close()


def proposer_of(execution: ExecutionConfig) -> ProposerFactory | None:
    """What makes the proposer once the target is loaded; None: no speculation."""
    speculative = execution.speculative_config
    return None if speculative is None else partial(make_proposer, speculative)


def draft_depth(speculative: SpeculativeConfig | None, max_num_seqs: int) -> DepthPolicy | FixedDepth | None:
    if speculative is None:
        return None
    most = speculative.num_speculative_tokens
    return DepthPolicy(max_num_seqs, most) if speculative.adaptive else FixedDepth(most)


def engine_core(config: RuntimeConfig, worker: Worker, executor: Executor, channel: CoreChannel) -> EngineCore:
    depth = draft_depth(config.execution.speculative_config, config.scheduler.max_num_seqs)
    limits = SchedulerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        max_model_len=worker.max_model_len,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
    )
    scheduler = make_scheduler(
        limits,
        policy=config.scheduler.scheduling_policy,
        num_blocks=worker.num_blocks,
        block_size=config.cache.block_size,
        groups=worker.layout.groups,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        depth=depth,
    )
    steps_ahead = _steps_ahead(config.scheduler, worker.device)
    return EngineCore(executor, channel, scheduler, steps_ahead=steps_ahead, step_costs=depth)


def _steps_ahead(scheduler: SchedulerConfig, device: torch.device) -> int:
    """On a CPU a step that is already handed over only makes new requests wait (docs/decisions/0004)."""
    is_ahead = device.type != "cpu" if scheduler.async_scheduling is None else scheduler.async_scheduling
    return scheduler.steps_ahead if is_ahead else 0


def _ready_message(config: RuntimeConfig, worker: Worker) -> EngineReady:
    return EngineReady(
        max_model_len=worker.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        vocab_size=worker.vocab_size,
        num_blocks=worker.num_blocks,
        block_size=config.cache.block_size,
        device=str(worker.device),
        attention_backend=worker.attention_backend,
        startup_seconds=worker.startup_seconds,
    )
