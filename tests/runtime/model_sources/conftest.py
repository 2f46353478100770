"""A hub and an object store of our own, with one small model in each."""

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.runtime.model_sources.hub_server import Hub, Repository, running_hub

from kvasir_runtime.model_sources.fetch import FetchLimits, fetch
from kvasir_runtime.model_sources.progress import ProgressMeter
from kvasir_runtime.model_sources.retries import RetryPolicy
from kvasir_runtime.model_sources.source import Source

IMPATIENT = FetchLimits(retries=RetryPolicy(max_attempts=2, pause_seconds=0.001), lock_poll_seconds=0.01)
WEIGHTS = "model.safetensors"
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}" * 200,
    WEIGHTS: random.Random(0).randbytes(3_000_000),
}
UNUSED = {"README.md": b"# A model", "pytorch_model.bin": b"\0" * 2000, "onnx/model.onnx": b"\0" * 2000}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """It has `hf://org/name`; HF_ENDPOINT points to it, and no token is set."""
    with running_hub() as running:
        running.repositories["org/name"] = Repository({**MODEL, **UNUSED})
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


@pytest.fixture
def download() -> Callable[[Source, Path], ProgressMeter]:
    """Into a folder; returns the meter that watched."""

    def run(source: Source, folder: Path, limits: FetchLimits = IMPATIENT) -> ProgressMeter:
        meter = ProgressMeter(source.address, time.monotonic)
        fetch(source, folder, meter, limits)
        return meter

    return run


def files_in(folder: Path) -> dict[str, bytes]:
    """All but ours."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".kvasir" not in path.parts
    }


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", **more}
