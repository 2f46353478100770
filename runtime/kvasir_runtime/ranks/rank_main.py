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
from functools import partial
from typing import NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]

from kvasir_runtime.errors import CollectiveFailedError, KvasirRuntimeError, RankFailedError
from kvasir_runtime.execution.device import select_device
from kvasir_runtime.execution.worker import Worker, load_worker
from kvasir_runtime.heartbeat import BEAT_SECONDS
from kvasir_runtime.logs import configure_logging
from kvasir_runtime.malloc import keep_freed_memory
from kvasir_runtime.parallel.groups import RankGroups, meet, open_meeting
from kvasir_runtime.parallel.stage import Stage
from kvasir_runtime.parallel.topology import RankPlace
from kvasir_runtime.ranks.links import LinkAddresses, RankLinks
from kvasir_runtime.ranks.meeting import told_addresses
from kvasir_runtime.ranks.messages import (
    Forward,
    IdleWorkDone,
    RankCame,
    RankFailed,
    RankReady,
    Sample,
    WorkInIdleTime,
)
from kvasir_runtime.ranks.rank_process import RankArguments
from kvasir_runtime.ranks.results import ResultSender
from kvasir_runtime.ranks.signs_of_life import SignsOfLife
from kvasir_runtime.ranks.status import RankStatus
from kvasir_runtime.service_secret import CurveKeys, curve_keys
from kvasir_runtime.speculative.select import proposer_of
from kvasir_runtime.transfer.nixl import NixlConnector
from kvasir_runtime.transfer.page_layout import PageParts, TensorPlace
from kvasir_runtime.transfer.rank_transfers import RankTransfers

logger = logging.getLogger(__name__)


def run_rank(arguments: RankArguments) -> None:
    """The child's whole life; it is killed in the end, or ends itself with status 1."""
    configure_logging(arguments.config.server.log_level)
    place, point = arguments.place, arguments.meeting_point
    keys = None if point.is_on_one_node else curve_keys(os.environ)
    links: RankLinks | None = None
    try:
        if arguments.addresses is not None:
            links = _links(arguments.addresses, place, keys)  # first: whatever fails from here on is heard there
        store = open_meeting(point, place.topology.num_ranks)
        addresses = arguments.addresses or told_addresses(store)
        if links is None:
            links = _links(addresses, place, keys)
        links.send(RankCame(place.rank))
        _serve(arguments, store, links, addresses.transfers[place.rank], keys)
    except Exception as error:
        end_with(links, place, error)


def _links(addresses: LinkAddresses, place: RankPlace, keys: CurveKeys | None) -> RankLinks:
    """This rank ends with the core at their other end."""
    links = RankLinks(addresses, place.rank, keys)
    if addresses.is_network:
        threading.Thread(target=_end_with_core, args=(links, place), name="core-watch", daemon=True).start()
    return links


def _end_with_core(links: RankLinks, place: RankPlace) -> None:
    while not links.has_core_gone():
        time.sleep(BEAT_SECONDS)
    end_with(None, place, RankFailedError("the engine core has gone, or node 0 cannot be reached any more"))


def end_with(links: RankLinks | None, place: RankPlace, error: Exception) -> NoReturn:
    """Say why, in this node's log and to the core where it is known, and end the process, whatever its other threads
    wait for."""
    is_foreseen = isinstance(error, KvasirRuntimeError)
    text = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
    logger.error("%s failed: %s", place.name, text, exc_info=None if is_foreseen else error)
    if links is not None:
        first_line = text.strip().split("\n")[0]
        links.send(RankFailed(place.rank, first_line, isinstance(error, CollectiveFailedError)))
        links.close()
    sys.stderr.flush()
    os._exit(1)


def _serve(
    arguments: RankArguments, store: Store, links: RankLinks, transfer_address: str, keys: CurveKeys | None
) -> None:
    config, place, host = arguments.config, arguments.place, arguments.meeting_point.own_address
    device = select_device(config.model.device, place)
    groups = meet(place, store, host, device, config.parallel.collective_backend, arguments.segment)
    status = RankStatus(arguments.status_file, place.topology.local_world_size, place.local_rank)
    signs = SignsOfLife(links, groups, status)  # from before anybody knows that it is ready
    worker = load_worker(
        config.model, config.cache, config.execution, config.scheduler, proposer_of(config.execution), groups
    )
    if config.cache.kv_transfer_config is not None:
        fail = partial(end_with, links, place)
        rank_transfers(worker, place, transfer_address, fail, keys).start()
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
    _take_steps(worker, groups, links, signs)


def rank_transfers(
    worker: Worker,
    place: RankPlace,
    address: str,
    on_failure: Callable[[Exception], object],
    keys: CurveKeys | None = None,
) -> RankTransfers:
    """Raises ConfigurationError without NIXL."""
    parts = PageParts(
        worker.description.kv_specs,
        worker.description.layout,
        TensorPlace(place.tensor_rank, place.tensor_size),
        Stage(place.pipeline_rank, place.pipeline_size),
    )
    connector = NixlConnector(f"{secrets.token_hex(8)}-{place.rank}", worker.runner.kv_buffer, parts)
    return RankTransfers(connector, address, on_failure, keys)


def _take_steps(worker: Worker, groups: RankGroups, links: RankLinks, signs: SignsOfLife) -> NoReturn:
    """In the order in which they come."""
    runner, place = worker.runner, groups.place
    results = ResultSender(links, lambda error: end_with(links, place, error)) if place.is_reporter else None
    worker.prepare_thread()
    while True:
        match links.receive():
            case Forward(plan=plan):
                signs.begin_step()
                runner.forward(plan)
            case Sample(mask=mask):
                pending = runner.sample(mask)
                signs.end_step()
                if results is not None:
                    results.send(pending)
            case WorkInIdleTime():
                has_more = runner.use_idle_time()
                if results is not None:
                    links.send(IdleWorkDone(has_more))
