"""Brings an engine's transfer agent up, and down again: its side channel first, so that a port in use is told before
the model is loaded, the rest once there is a KV buffer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvasir_runtime.config import KvTransferConfig, RuntimeConfig
from kvasir_runtime.engine.channel import CoreWaker
from kvasir_runtime.ranks.start import StartedRanks
from kvasir_runtime.server.model_digest import model_digest
from kvasir_runtime.service_secret import curve_keys
from kvasir_runtime.transfer.agent import TransferAgent
from kvasir_runtime.transfer.commands import Place
from kvasir_runtime.transfer.connector import Connector
from kvasir_runtime.transfer.handshake import identity
from kvasir_runtime.transfer.nixl import NixlConnector, check_installed
from kvasir_runtime.transfer.page_layout import PageParts, TensorPlace, bytes_on_all_ranks
from kvasir_runtime.transfer.rank_connectors import RankConnectors
from kvasir_runtime.transfer.side_channel import SideChannel


@contextmanager
def side_channel(transfer: KvTransferConfig | None, data_rank: int) -> Iterator[SideChannel | None]:
    """None where no KV is exchanged. A data-parallel rank listens on the port that is so much higher. Raises
    ConfigurationError.
    """
    if transfer is None:
        yield None
        return
    check_installed()
    extra = transfer.kv_connector_extra_config
    port = extra.side_channel_port + data_rank
    channel = SideChannel(extra.side_channel_host, port, curve_keys(os.environ))
    try:
        yield channel
    finally:
        channel.close()


@contextmanager
def transfer_agent(
    config: RuntimeConfig,
    ranks: StartedRanks,
    channel: SideChannel | None,
    engine_id: str,
    ipc_dir: Path,
    data_rank: int,
) -> Iterator[TransferAgent | None]:
    """Runs while the block does."""
    transfer = config.cache.kv_transfer_config
    if transfer is None or channel is None:
        yield None
        return
    extra = transfer.kv_connector_extra_config
    folder = Path(config.model.model)
    digest = model_digest(folder, Path(config.model.tokenizer or folder))
    wake_core = CoreWaker(ipc_dir, data_rank)
    stages, tensor_size = ranks.stages, config.parallel.tensor_parallel_size
    agent = TransferAgent(
        _connector(ranks, engine_id),
        channel,
        identity(digest, extra.revision, stages[0].layout, [stage.kv_specs for stage in stages], tensor_size),
        Place(
            engine_id=engine_id,
            host=extra.side_channel_host,
            port=channel.port,
            tensor_size=tensor_size,
            pipeline_size=config.parallel.pipeline_parallel_size,
        ),
        page_bytes=sum(bytes_on_all_ranks(stage.layout.page_bytes, stage.kv_specs, tensor_size) for stage in stages),
        lease_seconds=extra.lease_seconds,
        timeout_seconds=extra.timeout_seconds,
        checksums=extra.checksums,
        wake_core=wake_core,
        front=(extra.side_channel_host, extra.side_channel_port) if data_rank else None,
    )
    agent.start()
    try:
        yield agent
    finally:
        agent.close()
        wake_core.close()


def _connector(ranks: StartedRanks, engine_id: str) -> Connector:
    if ranks.kv_buffer is None:
        return RankConnectors(ranks.transfer_links)
    rank = ranks.description
    return NixlConnector(engine_id, ranks.kv_buffer, PageParts(rank.kv_specs, rank.layout, TensorPlace(0, 1)))
