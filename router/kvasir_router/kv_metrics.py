"""Reads an engine's KV-cache use and size from its /metrics text, by Kvasir's names or vLLM's."""

import re
from dataclasses import dataclass

_USAGE = re.compile(r"^(?:kvasir_kv_cache_usage_ratio|vllm:kv_cache_usage_perc)(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_CONFIG = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class KvMetrics:
    usage: float | None  # share of blocks in use, 0..1; of the fullest engine where several report
    capacity_tokens: int | None


def parse_kv_metrics(text: str) -> KvMetrics:
    """Absent or unreadable series give None: other engines may not have them."""
    usages = [float(value) for value in _USAGE.findall(text)]
    capacities = [_capacity_tokens(labels) for labels in _CONFIG.findall(text)]
    known = [capacity for capacity in capacities if capacity]
    return KvMetrics(usage=max(usages, default=None), capacity_tokens=sum(known) or None)


def _capacity_tokens(labels: str) -> int | None:
    values = dict(_LABEL.findall(labels))
    try:
        return int(values["num_gpu_blocks"]) * int(values["block_size"])
    except (KeyError, ValueError):
        return None
