"""The engine core's process from inside: load the model, say that it is ready, step until told to stop.

Its last word on a failure is `EngineFailed` to every API process.
"""

import gc
import logging
import sys
from pathlib import Path

import torch

from kvasir_runtime.config import RuntimeConfig
from kvasir_runtime.engine.channel import CoreChannel
from kvasir_runtime.engine.core import EngineCore
from kvasir_runtime.engine.messages import EngineFailed, EngineReady
from kvasir_runtime.errors import KvasirRuntimeError
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.execution.worker import Worker, load_worker
from kvasir_runtime.heartbeat import Heartbeats, beating, engine_heartbeats
from kvasir_runtime.logs import configure_logging
from kvasir_runtime.malloc import keep_freed_memory
from kvasir_runtime.scheduling.scheduler import SchedulerLimits, make_scheduler

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
    worker = load_worker(config.model, config.cache, config.execution, config.scheduler)
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


def engine_core(config: RuntimeConfig, worker: Worker, executor: Executor, channel: CoreChannel) -> EngineCore:
    limits = SchedulerLimits(
        config.scheduler.max_num_seqs, worker.max_num_batched_tokens, config.scheduler.enable_chunked_prefill
    )
    scheduler = make_scheduler(
        limits,
        policy=config.scheduler.scheduling_policy,
        num_blocks=worker.num_blocks,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
    return EngineCore(
        executor,
        channel,
        scheduler,
        block_size=config.cache.block_size,
        max_model_len=worker.max_model_len,
        one_step_ahead=_is_ahead(config.scheduler.async_scheduling, worker.device),
    )


def _is_ahead(wanted: bool | None, device: torch.device) -> bool:
    """On a CPU a step that is already handed over only makes new requests wait (docs/decisions/0004)."""
    return device.type != "cpu" if wanted is None else wanted


def _ready_message(config: RuntimeConfig, worker: Worker) -> EngineReady:
    return EngineReady(
        max_model_len=worker.max_model_len,
        vocab_size=worker.vocab_size,
        num_blocks=worker.num_blocks,
        block_size=config.cache.block_size,
        device=str(worker.device),
        attention_backend=worker.attention_backend,
        startup_seconds=worker.startup_seconds,
    )
