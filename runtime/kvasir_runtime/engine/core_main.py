"""The engine core's process from inside: load the model, say that it is ready, step until told to stop.

Its last word on a failure is `EngineFailed` to every API process.
"""

import gc
import logging
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from kvasir_runtime.config import ExecutionConfig, KvEventsConfig, RuntimeConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.engine.channel import CoreChannel
from kvasir_runtime.engine.core import EngineCore
from kvasir_runtime.engine.event_publisher import EventPublisher
from kvasir_runtime.engine.load_report import LoadReporter
from kvasir_runtime.engine.messages import EngineFailed, EngineReady
from kvasir_runtime.engine.router_feed import RouterFeed
from kvasir_runtime.errors import KvasirRuntimeError
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.execution.worker import ProposerFactory, Worker, load_worker
from kvasir_runtime.heartbeat import Heartbeats, beating, engine_heartbeats
from kvasir_runtime.kv_cache.events import KvEventLog
from kvasir_runtime.kv_cache.spec import num_tokens_in
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
        with _publisher(config.cache.kv_events_config) as publisher:  # first: a port in use is told before loading
            _serve(config, channel, engine_heartbeats(ipc_dir, config.server.api_server_count), publisher)
    except KvasirRuntimeError as error:  # a cause that the user can mend: no stack
        channel.broadcast(EngineFailed(error=str(error)))
        sys.exit(1)
    except Exception as error:
        logger.exception("the engine core failed")
        channel.broadcast(EngineFailed(error=f"{type(error).__name__}: {error}"))
        sys.exit(1)
    finally:
        channel.close()


@contextmanager
def _publisher(events: KvEventsConfig | None) -> Iterator[EventPublisher | None]:
    if events is None or not events.is_on:
        yield None
        return
    publisher = EventPublisher(events)
    try:
        yield publisher
    finally:
        publisher.close()


def _serve(
    config: RuntimeConfig, channel: CoreChannel, heartbeats: Heartbeats, publisher: EventPublisher | None
) -> None:
    worker = load_worker(config.model, config.cache, config.execution, config.scheduler, proposer_of(config.execution))
    instance = secrets.token_hex(8)
    with beating(heartbeats):  # from before anybody knows that it is ready
        channel.broadcast(_ready_message(config, worker, instance))
        logger.info(
            "ready: %s on %s, attention %s, %d KV blocks of %d tokens, context %d; %s",
            config.model.model, worker.device, worker.attention_backend, worker.num_blocks, config.cache.block_size,
            worker.max_model_len,
            ", ".join(f"{name} {seconds:.2f} s" for name, seconds in worker.startup_seconds.items()),
        )  # fmt: skip
        feed = None if publisher is None else router_feed(config, worker, publisher, instance)
        _run(config, worker, channel, feed)


def _run(config: RuntimeConfig, worker: Worker, channel: CoreChannel, feed: RouterFeed | None) -> None:
    gc.collect()
    gc.freeze()  # what loading left behind is not walked again in the middle of a step
    if worker.device.type == "cpu":
        keep_freed_memory()
    executor = Executor(worker.runner, worker.prepare_thread)
    try:
        engine_core(config, worker, executor, channel, feed).run()
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


def router_feed(config: RuntimeConfig, worker: Worker, publisher: EventPublisher, instance: str) -> RouterFeed:
    events = config.cache.kv_events_config
    reporter = LoadReporter(events.load_hz, instance) if events is not None and events.load_hz else None
    return RouterFeed(KvEventLog(config.cache.block_size, worker.layout.groups), publisher, reporter)


def engine_core(
    config: RuntimeConfig, worker: Worker, executor: Executor, channel: CoreChannel, feed: RouterFeed | None
) -> EngineCore:
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
        event_log=None if feed is None else feed.event_log,
    )
    steps_ahead = _steps_ahead(config.scheduler, worker.device)
    return EngineCore(executor, channel, scheduler, steps_ahead=steps_ahead, step_costs=depth, router_feed=feed)


def _steps_ahead(scheduler: SchedulerConfig, device: torch.device) -> int:
    """On a CPU a step that is already handed over only makes new requests wait (docs/decisions/0004)."""
    is_ahead = device.type != "cpu" if scheduler.async_scheduling is None else scheduler.async_scheduling
    return scheduler.steps_ahead if is_ahead else 0


def _ready_message(config: RuntimeConfig, worker: Worker, instance: str) -> EngineReady:
    return EngineReady(
        max_model_len=worker.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        vocab_size=worker.vocab_size,
        num_blocks=worker.num_blocks,
        block_size=config.cache.block_size,
        device=str(worker.device),
        attention_backend=worker.attention_backend,
        startup_seconds=worker.startup_seconds,
        kv_capacity_tokens=num_tokens_in(worker.num_blocks, config.cache.block_size, len(worker.layout.groups)),
        instance=instance,
    )
