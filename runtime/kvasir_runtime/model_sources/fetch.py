"""One model from its source into its cache: once, however many processes ask for it at the same time."""

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

from kvasir_runtime.model_sources.cache import ModelCache
from kvasir_runtime.model_sources.download import Download
from kvasir_runtime.model_sources.progress import ProgressMeter, as_text
from kvasir_runtime.model_sources.retries import RetryPolicy, persistently
from kvasir_runtime.model_sources.selection import serving_files
from kvasir_runtime.model_sources.source import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """`size_limit_bytes`: of the cache's volume, where its file system does not know it; None: that one does."""

    size_limit_bytes: int | None = None
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    lock_poll_seconds: float = 1.0


def fetch(source: Source, folder: Path, meter: ProgressMeter, limits: FetchLimits) -> None:
    """Returns when `folder` holds the model, complete and checked. Raises FetchError.

    A complete folder is taken as it is, without asking the source: a branch that has moved on since changes nothing.
    """
    cache = ModelCache(folder, source.address)
    if not cache.is_complete:
        meter.enter("waiting")
        with cache.filling(limits.lock_poll_seconds):
            if not cache.is_complete:
                _fill(cache, source, meter, limits)
    meter.enter("complete")
    logger.info("%s: complete in %s", source.address, folder)


def _fill(cache: ModelCache, source: Source, meter: ProgressMeter, limits: FetchLimits) -> None:
    meter.enter("resolving")
    listing = persistently(source.list_files, limits.retries, threading.Event())
    files = serving_files(listing.files, source.address)
    total_bytes = sum(file.size_bytes for file in files)
    cache.prepare(listing, files)
    cache.require_space(total_bytes - cache.bytes_present(files), total_bytes, limits.size_limit_bytes)
    logger.info("%s: %d files, %s, revision %s", source.address, len(files), as_text(total_bytes), listing.revision)
    meter.begin(total_bytes)
    Download(source, cache, meter, limits.retries).run(files)
    cache.complete(listing, files)
