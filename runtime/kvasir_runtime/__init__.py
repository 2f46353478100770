"""Kvasir's inference engine: API processes in front of a core that owns scheduler, KV cache and device."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvasir")
except PackageNotFoundError:  # a tree on PYTHONPATH that was never installed
    __version__ = "unknown"
