"""Kvasir's inference engine: API processes in front of a core that owns scheduler, KV cache and device."""

__version__ = "0.1.0"
