"""Kvasir's router: one OpenAI endpoint in front of engine replicas, each request goes where prefill ends first."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvasir")
except PackageNotFoundError:  # a tree on PYTHONPATH that was never installed
    __version__ = "unknown"
