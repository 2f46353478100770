"""`kvasir-runtime fetch SOURCE FOLDER`: what the operator's init container and `kvasir-operator local` run; and what
`serve` does first with a model that lies elsewhere."""

import argparse
import dataclasses
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from kvasir_logging import LogFormat, LogLevel
from kvasir_runtime.config import ModelConfig
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.model_sources.cache import ModelCache
from kvasir_runtime.model_sources.fetch import FetchLimits, fetch
from kvasir_runtime.model_sources.progress import ProgressMeter
from kvasir_runtime.model_sources.reporter import Reporter, answering
from kvasir_runtime.model_sources.source import Source
from kvasir_runtime.server.launch import listen

_REPORT_SECONDS = 5.0
_STALL_SECONDS = 60.0
_SCHEMES = ("hf://", "s3://")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")


def add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="hf://ORG/NAME[@REVISION] or s3://BUCKET[/PREFIX]")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where the model is to lie; made where it is not")
    parser.add_argument("--host", default="127.0.0.1", help="address of GET /progress; :: is every address")
    parser.add_argument("--port", type=int, default=None, help="port of GET /progress; default: it is not served")
    parser.add_argument(
        "--size-limit", type=int, default=None, metavar="BYTES", help="most that FOLDER may take; default: its disk"
    )
    parser.add_argument(
        "--stall-timeout",
        type=float,
        default=_STALL_SECONDS,
        metavar="SECONDS",
        help="longest wait for a byte, three times over",
    )
    parser.add_argument("--log-level", choices=get_args(LogLevel), default="info", help="least severe level logged")
    parser.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        default="text",
        help="lines of text, or an object of JSON a message",
    )


def run_fetch(namespace: argparse.Namespace) -> int:
    """Exit status 0. Raises FetchError, and ConfigurationError for arguments that cannot work."""
    stall_seconds, limits = namespace.stall_timeout, FetchLimits(namespace.size_limit)
    _download(namespace.source, namespace.folder, stall_seconds, limits, namespace.host, namespace.port)
    return 0


def fetched(model: ModelConfig) -> ModelConfig:
    """With the folder of a checkpoint that lies elsewhere, once it is there, and the name that clients know it by.
    Raises FetchError, and ConfigurationError for what is neither here nor can be fetched."""
    is_address = model.model.startswith(_SCHEMES)
    if not is_address and (Path(model.model).exists() or not _HUB_NAME.fullmatch(model.model)):
        return model
    address = model.model if is_address else f"hf://{model.model}"
    name = address.partition("://")[2]
    folder = Path(model.download_dir).expanduser() / name
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    _download(address, folder, _STALL_SECONDS, FetchLimits())
    for number, handler in former.items():
        signal.signal(number, handler)
    names = model.served_model_name or (name.partition("@")[0],)
    return dataclasses.replace(model, model=str(folder), served_model_name=names)


def _download(
    address: str, folder: Path, stall_seconds: float, limits: FetchLimits, host: str = "", port: int | None = None
) -> None:
    """With progress in the log, and at `port`."""
    # As the first process of a container it would be deaf to it. What is on disk is where the next run goes on.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    # They log each URL, and those of a hub's files are signed; at debug headers too, which hold session tokens.
    for library in ("httpx", "httpx2", "httpcore", "httpcore2", "botocore", "urllib3"):
        logging.getLogger(library).setLevel(logging.WARNING)
    source = open_source(address, stall_seconds)
    meter = ProgressMeter(source.address, time.monotonic)
    reporter = Reporter(meter, ModelCache(folder, source.address), _REPORT_SECONDS)
    with reporter.running(), _served(reporter, host, port):
        fetch(source, folder, meter, limits)


def open_source(address: str, stall_seconds: float) -> Source:
    """Imports within: each library takes half a second, and a process needs one of them."""
    if address.startswith("hf://"):
        from kvasir_runtime.model_sources.hub import HubSource

        return HubSource(address, stall_seconds)
    if address.startswith("s3://"):
        from kvasir_runtime.model_sources.s3 import S3Source

        return S3Source(address, stall_seconds)
    raise ConfigurationError(f"SOURCE is {address}: expected hf://ORG/NAME[@REVISION] or s3://BUCKET[/PREFIX]")


@contextmanager
def _served(reporter: Reporter, host: str, port: int | None) -> Iterator[None]:
    if port is None:
        yield
        return
    with answering(reporter, listen(host, port)):
        yield
