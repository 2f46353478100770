"""The engine core's process from inside: load the model, say that it is ready, step until told to stop.

Its last word on a failure is `EngineFailed` to every API process.
"""

import gc
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

from kvasir_logging import log_to_stderr
from kvasir_runtime.config import KvEventsConfig, KvTransferConfig, RuntimeConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.engine.channel import CoreChannel, tell_api_processes
from kvasir_runtime.engine.core import EngineCore, StepExecutor
from kvasir_runtime.engine.kv_transfers import KvTransfers
from kvasir_runtime.engine.load_report import LoadReporter
from kvasir_runtime.engine.messages import EngineFailed, EngineReady
from kvasir_runtime.engine.router_feed import EventPublisher, RouterFeed
from kvasir_runtime.engine.sleeping import KV_LEVEL, WEIGHTS_LEVEL, free_memory, sleep_until_woken
from kvasir_runtime.errors import KvasirRuntimeError, RankFailedError
from kvasir_runtime.execution.description import RankDescription
from kvasir_runtime.heartbeat import Heartbeats, beating, core_heartbeats
from kvasir_runtime.kv_cache.events import KvEventLog
from kvasir_runtime.kv_cache.kv_cache import num_tokens_in
from kvasir_runtime.ranks.start import running_ranks_of
from kvasir_runtime.scheduling.scheduler import Scheduler, make_scheduler
from kvasir_runtime.scheduling.step import SchedulerLimits, StepBudget
from kvasir_runtime.speculative.depth import DepthPolicy, FixedDepth
from kvasir_runtime.transfer.agent import TransferAgent
from kvasir_runtime.transfer.launch import side_channel, transfer_agent
from kvasir_runtime.transfer.side_channel import SideChannel

logger = logging.getLogger(__name__)


def run_engine_core(config: RuntimeConfig, ipc_dir: Path, data_rank: int) -> None:
    """The child's whole life."""
    log_to_stderr(config.server.log_level, config.server.log_format)
    num_apis, num_cores = config.server.api_server_count, config.parallel.data_parallel_size
    channel = CoreChannel(ipc_dir, num_apis, data_rank)
    heartbeats = core_heartbeats(ipc_dir, num_apis, num_cores, data_rank)
    rank = data_rank if num_cores > 1 else None
    try:
        with (  # first: a port in use is told at once
            _publisher(config.cache.kv_events_config, rank) as publisher,
            side_channel(config.cache.kv_transfer_config, data_rank) as others,
        ):
            _serve(config, data_rank, channel, ipc_dir, heartbeats, publisher, others)
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
def _publisher(events: KvEventsConfig | None, data_parallel_rank: int | None) -> Iterator[EventPublisher | None]:
    if events is None or not events.is_on:
        yield None
        return
    publisher = EventPublisher(events, data_parallel_rank)
    try:
        yield publisher
    finally:
        publisher.close()


def _serve(
    config: RuntimeConfig,
    data_rank: int,
    channel: CoreChannel,
    ipc_dir: Path,
    heartbeats: Heartbeats,
    publisher: EventPublisher | None,
    others: SideChannel | None,
) -> NoReturn:
    """With weights, and without while it sleeps at level 2."""
    with ExitStack() as signs_of_life:
        begin = cache(lambda: signs_of_life.enter_context(beating(heartbeats)))  # goes on while it loads again
        while True:
            _run_with_weights(config, data_rank, channel, ipc_dir, begin, publisher, others)
            free_memory()
            sleep_until_woken(channel, WEIGHTS_LEVEL)


def _run_with_weights(
    config: RuntimeConfig,
    data_rank: int,
    channel: CoreChannel,
    ipc_dir: Path,
    begin_beating: Callable[[], None],
    publisher: EventPublisher | None,
    others: SideChannel | None,
) -> None:
    """Until the engine is to sleep without. Behind it nothing of them is left."""
    instance = secrets.token_hex(8)
    end = partial(_end_with, ipc_dir, config.server.api_server_count, data_rank)
    with (
        running_ranks_of(config, ipc_dir, data_rank, end) as ranks,
        transfer_agent(config, ranks, others, instance, ipc_dir, data_rank) as agent,
    ):
        begin_beating()  # from before anybody knows that it is ready
        rank = ranks.description
        ready = _ready_message(config, rank, instance)
        channel.broadcast(ready)
        logger.info(
            "ready: %s on %s, attention %s, %d KV blocks of %d tokens, context %d; %s",
            config.model.model, rank.device, rank.attention_backend, rank.num_blocks, config.cache.block_size,
            rank.max_model_len,
            ", ".join(f"{name} {seconds:.2f} s" for name, seconds in rank.startup_seconds.items()),
        )  # fmt: skip
        gc.collect()
        gc.freeze()  # what loading left behind is not walked again in the middle of a step
        feed = None if publisher is None else router_feed(config, rank, publisher, instance, agent)
        core = engine_core(config, rank, ranks.executor, channel, feed, agent)
        while core.run() == KV_LEVEL:
            ranks.executor.release_kv()
            sleep_until_woken(channel, KV_LEVEL)
            ranks.executor.restore_kv()
            channel.broadcast(ready)


def _end_with(ipc_dir: Path, num_apis: int, data_rank: int, failure: RankFailedError) -> NoReturn:
    """End this process, whatever the step loop waits for; the ranks that are left follow it."""
    logger.error("%s", failure)
    tell_api_processes(ipc_dir, num_apis, data_rank, EngineFailed(error=str(failure)))
    sys.stderr.flush()
    os._exit(1)


def draft_depth(speculative: SpeculativeConfig | None, max_num_seqs: int) -> DepthPolicy | FixedDepth | None:
    if speculative is None:
        return None
    most = speculative.num_speculative_tokens
    return DepthPolicy(max_num_seqs, most) if speculative.adaptive else FixedDepth(most)


def router_feed(
    config: RuntimeConfig,
    rank: RankDescription,
    publisher: EventPublisher,
    instance: str,
    agent: TransferAgent | None = None,
) -> RouterFeed:
    events = config.cache.kv_events_config
    num_cores = config.parallel.data_parallel_size
    reporter = None
    if events is not None and events.load_hz:
        port = _exchange_port(config.cache.kv_transfer_config, agent)
        reporter = LoadReporter(events.load_hz, instance, num_cores, port)
    return RouterFeed(KvEventLog(config.cache.block_size, rank.layout.groups), publisher, reporter)


def _exchange_port(transfer: KvTransferConfig | None, agent: TransferAgent | None) -> int | None:
    """Where other engines ask for what is cached here; None where this one only gives, or only takes."""
    if transfer is None or agent is None or not (transfer.can_produce and transfer.can_consume):
        return None
    return transfer.kv_connector_extra_config.side_channel_port or agent.place.port


def engine_core(
    config: RuntimeConfig,
    rank: RankDescription,
    executor: StepExecutor,
    channel: CoreChannel,
    feed: RouterFeed | None,
    agent: TransferAgent | None = None,
    depth: DepthPolicy | FixedDepth | None = None,
) -> EngineCore:
    """`depth`: who decides on the number of drafts; None: whom the configuration asks for."""
    if depth is None:
        depth = draft_depth(config.execution.speculative_config, config.scheduler.max_num_seqs)
    limits = SchedulerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=rank.max_num_batched_tokens,
        max_model_len=rank.max_model_len,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill and not rank.computes_whole_prompts,
        num_stages=config.parallel.pipeline_parallel_size,
        step_budget=_step_budget(config, rank),
    )
    scheduler = make_scheduler(
        limits,
        policy=config.scheduler.scheduling_policy,
        preemption_threshold=config.scheduler.priority_preemption_threshold,
        num_blocks=rank.num_blocks,
        block_size=config.cache.block_size,
        groups=rank.layout.groups,
        enable_prefix_caching=config.cache.enable_prefix_caching and not rank.computes_whole_prompts,
        depth=depth,
        event_log=None if feed is None else feed.event_log,
    )
    steps_ahead = max(_steps_ahead(config.scheduler, rank), limits.num_stages - 1)  # else stages would wait
    return EngineCore(
        executor,
        channel,
        scheduler,
        steps_ahead=steps_ahead,
        observers=[each.observe_step for each in (depth, limits.step_budget) if each is not None],
        router_feed=feed,
        transfers=None if agent is None else kv_transfers(config.cache.kv_transfer_config, scheduler, agent),
    )


def _step_budget(config: RuntimeConfig, rank: RankDescription) -> StepBudget | None:
    if not config.scheduler.enable_chunked_prefill or rank.computes_whole_prompts:
        return None
    return StepBudget(rank.max_num_batched_tokens, config.scheduler.max_step_ms / 1000, config.cache.block_size)


def kv_transfers(transfer: KvTransferConfig | None, scheduler: Scheduler, agent: TransferAgent) -> KvTransfers:
    fails = transfer is not None and transfer.kv_load_failure_policy == "fail"
    return KvTransfers(scheduler, agent, agent.place, page_bytes=agent.page_bytes, fails_requests=fails)


def _steps_ahead(scheduler: SchedulerConfig, rank: RankDescription) -> int:
    """On a CPU a step that is already handed over only makes new requests wait (docs/decisions/0004)."""
    is_ahead = not rank.is_on_cpu if scheduler.async_scheduling is None else scheduler.async_scheduling
    return scheduler.steps_ahead if is_ahead else 0


def _ready_message(config: RuntimeConfig, rank: RankDescription, instance: str) -> EngineReady:
    return EngineReady(
        max_model_len=rank.max_model_len,
        max_model_len_cut_from=rank.max_model_len_cut_from,
        max_num_seqs=config.scheduler.max_num_seqs,
        vocab_size=rank.vocab_size,
        num_blocks=rank.num_blocks,
        block_size=config.cache.block_size,
        device=rank.device,
        attention_backend=rank.attention_backend,
        startup_seconds=rank.startup_seconds,
        kv_capacity_tokens=num_tokens_in(rank.num_blocks, config.cache.block_size, len(rank.layout.groups)),
        instance=instance,
    )
