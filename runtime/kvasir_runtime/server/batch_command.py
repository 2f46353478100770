"""`kvasir-runtime run-batch MODEL -i FILE -o FILE`: the engine, a server that nobody else is told of, and a batch.

The answers have their file's name once all are there; until then it ends in `.partial`, and stays if the batch ends
early.
"""

import argparse
import asyncio
import dataclasses
import logging
import os
import signal
import socket
from pathlib import Path
from typing import IO

import httpx2
import uvloop

from kvasir_runtime.config import RuntimeConfig
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.heartbeat import BEAT_SECONDS, SILENT_SECONDS
from kvasir_runtime.server.app import WORKING_PATHS
from kvasir_runtime.server.batch import Batch, BatchCounts
from kvasir_runtime.server.launch import API_KEY_VARIABLE, ApiServer
from kvasir_runtime.server.probes import HEALTH_PATH, READY_PATH

logger = logging.getLogger(__name__)
HOST = "127.0.0.1"
NUM_AT_ONCE = 256
NUM_PROBES = 16
"""Connections besides those of the requests."""
PARTIAL = ".partial"
READY_SECONDS = 0.1
"""Between questions whether the engine is ready."""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchFiles:
    input: Path
    output: Path
    num_at_once: int

    @property
    def partial(self) -> Path:
        return self.output.with_name(self.output.name + PARTIAL)


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    group.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, one a line")
    group.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="where answers go")
    group.add_argument(
        "--requests-at-once", type=int, default=NUM_AT_ONCE, metavar="N", help="most requests under way together"
    )


def batch_files(namespace: argparse.Namespace) -> BatchFiles:
    """Raises ConfigurationError."""
    files = BatchFiles(namespace.input_file, namespace.output_file, namespace.requests_at_once)
    if files.num_at_once < 1:
        raise ConfigurationError(f"--requests-at-once is {files.num_at_once}; give 1 or more")
    if not files.input.is_file():
        raise ConfigurationError(f"--input-file is {files.input}, which is no file; give one of requests, one a line")
    if not files.output.parent.is_dir():
        raise ConfigurationError(f"--output-file is {files.output}, but {files.output.parent} is no folder; make it")
    return files


def for_a_batch(config: RuntimeConfig, num_at_once: int) -> RuntimeConfig:
    """A server of one process that is asked by this one alone and refuses nothing for want of room.

    Raises ConfigurationError.
    """
    if config.parallel.nnodes > 1:
        raise ConfigurationError(f"--nnodes is {config.parallel.nnodes}, but run-batch works on one machine alone")
    most_connections = num_at_once + NUM_PROBES
    server = dataclasses.replace(
        config.server,
        host=HOST,
        port=0,
        api_server_count=1,
        max_sequences_in_flight=num_at_once * config.server.max_request_sequences,
        max_connections=most_connections,
        max_connections_per_peer=most_connections,
        shutdown_delay=0.0,
    )
    return dataclasses.replace(config, server=server)


def run_batch(config: RuntimeConfig, listener: socket.socket, ipc_dir: Path, files: BatchFiles) -> int:
    """Exit status: 0 once every line has an answer, whatever it says, 1 where the batch ended early."""
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it reports each request at INFO, as the server does
    return uvloop.run(_run(config, listener, ipc_dir, files))


async def _run(config: RuntimeConfig, listener: socket.socket, ipc_dir: Path, files: BatchFiles) -> int:
    server = ApiServer(config, 0, [listener], ipc_dir)
    serving = asyncio.create_task(server.run())
    batch = asyncio.create_task(_answer(config, listener.getsockname()[1], files))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, batch.cancel)
    await asyncio.wait((serving, batch), return_when=asyncio.FIRST_COMPLETED)
    batch.cancel()
    for _ in range(2):  # at once
        server.stop()
    status = await serving
    [counts] = await asyncio.gather(batch, return_exceptions=True)
    if status or not isinstance(counts, BatchCounts):
        logger.error("the batch ended early: %s; what was answered is in %s", _reason(counts), files.partial)
        return 1
    files.partial.replace(files.output)
    logger.info("%d lines answered in %s, %d with an error", counts.num_answered, files.output, counts.num_failed)
    return 0


def _reason(ending: BatchCounts | BaseException) -> str:
    while isinstance(ending, BaseExceptionGroup):
        ending = ending.exceptions[0]
    match ending:
        case BatchCounts():
            return "the engine has died"
        case asyncio.CancelledError():
            return "it was stopped, or the engine has died"
        case _:
            return f"{type(ending).__name__}: {ending}"


async def _answer(config: RuntimeConfig, port: int, files: BatchFiles) -> BatchCounts:
    key = config.server.api_key or os.environ.get(API_KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(
        base_url=f"http://{HOST}:{port}", headers=headers, timeout=None, limits=limits, trust_env=False
    ) as client:
        await _until_ready(client)
        with files.input.open("rb") as lines, files.partial.open("wb", buffering=0) as partial:
            answering = asyncio.create_task(_answer_lines(client, lines, partial, files.num_at_once))
            hanging = asyncio.create_task(_until_hung(client))
            try:
                await asyncio.wait((answering, hanging), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    raise TimeoutError("the engine hangs")
                return answering.result()
            finally:
                answering.cancel()
                hanging.cancel()
                await asyncio.gather(answering, hanging, return_exceptions=True)


async def _answer_lines(
    client: httpx2.AsyncClient, lines: IO[bytes], partial: IO[bytes], num_at_once: int
) -> BatchCounts:
    return await Batch(client, WORKING_PATHS, partial.write).answer_all(lines, num_at_once)


async def _until_ready(client: httpx2.AsyncClient) -> None:
    """A server that cannot become ready ends by itself."""
    while True:
        if (await client.get(READY_PATH)).status_code == httpx2.codes.OK:
            return
        await asyncio.sleep(READY_SECONDS)


async def _until_hung(client: httpx2.AsyncClient) -> None:
    num_failures = 0
    while num_failures * BEAT_SECONDS < SILENT_SECONDS:
        await asyncio.sleep(BEAT_SECONDS)
        is_healthy = (await client.get(HEALTH_PATH)).status_code == httpx2.codes.OK
        num_failures = 0 if is_healthy else num_failures + 1
