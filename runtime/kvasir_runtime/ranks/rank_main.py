"""A rank's process from inside: meet the others, load this rank's part, then take steps as they come.

Its last word on a failure is `RankFailed`. A step that raises is one: the other ranks stand in the middle of it. When
the core has gone it ends, also in the middle of a step: the ranks that it waits for may have gone as well.
"""

import gc
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import NoReturn

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from kvasir_logging import log_to_stderr
from kvasir_runtime.engine.tokenizer import load_vocabulary
from kvasir_runtime.errors import CollectiveFailedError, KvasirRuntimeError, StageFailedError
from kvasir_runtime.execution.device import select_device
from kvasir_runtime.execution.executor import PendingResult
from kvasir_runtime.execution.worker import Worker, load_worker
from kvasir_runtime.heartbeat import BEAT_SECONDS
from kvasir_runtime.malloc import keep_freed_memory
from kvasir_runtime.parallel.groups import RankGroups, meet, open_meeting
from kvasir_runtime.parallel.meeting_point import MeetingPoint
from kvasir_runtime.parallel.stage import Stage
from kvasir_runtime.parallel.topology import RankPlace
from kvasir_runtime.ranks.evidence import CORE_GONE_STATUS
from kvasir_runtime.ranks.links import LinkAddresses, RankLinks
from kvasir_runtime.ranks.meeting import told_addresses
from kvasir_runtime.ranks.messages import (
    Forward,
    GrammarPrepared,
    IdleWorkDone,
    PrepareGrammar,
    RankCame,
    RankFailed,
    RankReady,
    ReleaseKv,
    RestoreKv,
    Sample,
    StepDone,
    StepFailed,
    WorkInIdleTime,
)
from kvasir_runtime.ranks.rank_process import RankArguments
from kvasir_runtime.ranks.signs_of_life import SignsOfLife
from kvasir_runtime.ranks.status import RankStatus
from kvasir_runtime.service_secret import CurveKeys, curve_keys
from kvasir_runtime.speculative.select import proposer_of
from kvasir_runtime.transfer.connector import Connector
from kvasir_runtime.transfer.nixl import NixlConnector
from kvasir_runtime.transfer.page_layout import PageParts, TensorPlace
from kvasir_runtime.transfer.rank_transfers import RankTransfers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank ends."""

    place: RankPlace
    end_process: Callable[[int], NoReturn]

    def __call__(self, links: RankLinks | None, error: Exception) -> NoReturn:
        """Say why, in this node's log and to the core where it is known, and end the process, whatever its other
        threads wait for."""
        is_foreseen = isinstance(error, KvasirRuntimeError)
        text = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
        logger.error("%s failed: %s", self.place.name, text, exc_info=None if is_foreseen else error)
        if links is not None:
            first_line = text.strip().split("\n")[0]
            links.send(RankFailed(self.place.rank, first_line, isinstance(error, CollectiveFailedError)))
            links.close()
        sys.stderr.flush()
        self.end_process(1)


def run_rank(
    arguments: RankArguments,
    meet_at: Callable[[MeetingPoint, int], Store] = open_meeting,
    end_process: Callable[[int], NoReturn] = os._exit,
) -> None:
    """The child's whole life; it is killed in the end, or ends itself with status 1, or as the core has gone."""
    log_to_stderr(arguments.config.server.log_level, arguments.config.server.log_format)
    place, point = arguments.place, arguments.meeting_point
    end = RankEnd(place, end_process)
    keys = None if point.is_on_one_node else curve_keys(os.environ)
    links: RankLinks | None = None
    try:
        if arguments.addresses is not None:
            links = _links(arguments.addresses, end, keys)  # first: whatever fails from here on is heard there
        store = meet_at(point, place.topology.num_ranks)
        addresses = arguments.addresses or told_addresses(store)
        if links is None:
            links = _links(addresses, end, keys)
        links.send(RankCame(place.rank))
        _serve(arguments, store, links, end, addresses.transfers[place.rank], keys)
    except Exception as error:
        end(links, error)


def _links(addresses: LinkAddresses, end: RankEnd, keys: CurveKeys | None) -> RankLinks:
    """This rank ends with the core at their other end."""
    links = RankLinks(addresses, end.place.rank, keys)
    if addresses.is_network:
        threading.Thread(target=_end_with_core, args=(links, end), name="core-watch", daemon=True).start()
    return links


def _end_with_core(links: RankLinks, end: RankEnd) -> None:
    while not links.has_core_gone():
        time.sleep(BEAT_SECONDS)
    logger.info("%s ends, as the engine core has gone, or node 0 cannot be reached any more", end.place.name)
    sys.stderr.flush()
    end.end_process(CORE_GONE_STATUS)


def _serve(
    arguments: RankArguments,
    store: Store,
    links: RankLinks,
    end: RankEnd,
    transfer_address: str,
    keys: CurveKeys | None,
) -> None:
    config, place, host = arguments.config, arguments.place, arguments.meeting_point.own_address
    device = select_device(config.model.device, place)
    groups = meet(place, store, host, device, config.parallel.collective_backend, arguments.segment)
    status = RankStatus(arguments.status_file, place.topology.local_world_size, place.local_rank)
    signs = SignsOfLife(links, groups, status)  # from before anybody knows that it is ready
    worker = load_worker(
        config.model,
        config.cache,
        config.execution,
        config.scheduler,
        proposer_of(config.execution),
        groups,
        make_vocabulary=partial(load_vocabulary, config.model),
    )
    if config.cache.kv_transfer_config is not None:
        rank_transfers(worker, place, transfer_address, partial(end, links), keys).start()
    links.send(RankReady(place.rank, worker.description))
    status.set_ready()
    logger.info(
        "%s is ready on %s, collectives over %s: %s", place.name, worker.description.device, groups.tensor.name,
        ", ".join(f"{name} {seconds:.2f} s" for name, seconds in worker.description.startup_seconds.items()),
    )  # fmt: skip
    gc.collect()
    gc.freeze()  # what loading left behind is not walked again in the middle of a step
    if worker.description.is_on_cpu:
        keep_freed_memory()
    _take_steps(worker, groups, links, signs, end)


def rank_transfers(
    worker: Worker,
    place: RankPlace,
    address: str,
    on_failure: Callable[[Exception], object],
    keys: CurveKeys | None = None,
    make_connector: Callable[[str, Tensor, PageParts], Connector] = NixlConnector,
) -> RankTransfers:
    """Raises ConfigurationError without NIXL."""
    parts = PageParts(
        worker.description.kv_specs,
        worker.description.layout,
        TensorPlace(place.tensor_rank, place.tensor_size),
        Stage(place.pipeline_rank, place.pipeline_size),
    )
    connector = make_connector(f"{secrets.token_hex(8)}-{place.rank}", worker.runner.kv_buffer, parts)
    return RankTransfers(connector, address, on_failure, keys)


def _take_steps(worker: Worker, groups: RankGroups, links: RankLinks, signs: SignsOfLife, end: RankEnd) -> NoReturn:
    """In the order in which they come."""
    runner = worker.runner
    results = ResultSender(links, partial(end, links)) if groups.place.is_reporter else None
    worker.prepare_thread()
    while True:
        match message := links.receive():
            case Forward(plan=plan):
                signs.begin_step()
                runner.forward(plan)
            case Sample():
                pending = runner.sample()
                signs.end_step()
                if results is not None:
                    results.send(pending)
            case PrepareGrammar():
                _prepare_grammar(worker, links, message)
            case ReleaseKv():
                runner.kv_memory.release()
            case RestoreKv():
                runner.kv_memory.restore()
            case WorkInIdleTime():
                has_more = runner.use_idle_time()
                if results is not None:
                    links.send(IdleWorkDone(has_more))


def _prepare_grammar(worker: Worker, links: RankLinks, wanted: PrepareGrammar) -> None:
    def tell(_: object = None) -> None:
        links.send(GrammarPrepared(wanted.number))

    if worker.prepare_grammar is None:
        tell()
    else:
        worker.prepare_grammar(wanted.grammar).add_done_callback(tell)


class ResultSender:
    """Sends a rank's results when the device has them, so that the thread that runs steps never waits for it."""

    def __init__(self, links: RankLinks, on_failure: Callable[[Exception], object]) -> None:
        self._links = links
        self._on_failure = on_failure
        self._pending: SimpleQueue[PendingResult] = SimpleQueue()
        threading.Thread(target=self._run, name="results", daemon=True).start()

    def send(self, pending: PendingResult) -> None:
        """After those before it."""
        self._pending.put(pending)

    def _run(self) -> None:
        try:
            while True:
                self._links.send(_outcome(self._pending.get()))
        except Exception as error:
            self._on_failure(error)


def _outcome(pending: PendingResult) -> StepDone | StepFailed:
    try:
        return StepDone(pending.result())
    except StageFailedError as error:
        return StepFailed(str(error))
