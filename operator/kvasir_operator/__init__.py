"""Kvasir's operator: InferenceServices become engines and routers of a cluster, or processes of this machine."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvasir")
except PackageNotFoundError:  # a tree on PYTHONPATH that was never installed
    __version__ = "unknown"
