"""Reads an engine's KV-cache use and size, and its queue, from its /metrics text, by Kvasir's names or vLLM's."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_USAGE = frozenset({"kvasir_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"})
_CONFIG = "vllm:cache_config_info"
_WAITING = frozenset({"kvasir_num_requests_waiting", "vllm:num_requests_waiting"})
# Parsing a whole page takes milliseconds, and an engine's is mostly histograms.
_READ = (*_USAGE, *_WAITING, _CONFIG)


@dataclass(frozen=True, slots=True)
class KvMetrics:
    usage: float | None  # share of blocks in use, 0..1; of the fullest engine where several report
    capacity_tokens: int | None
    num_waiting: int | None  # requests; of all engines that report


def parse_kv_metrics(text: str) -> KvMetrics:
    """Absent or unreadable series give None, and so do values that are no amounts: other engines are as they are."""
    samples = _samples(line for line in text.splitlines() if line.startswith(_READ))
    usages = [sample.value for sample in samples if sample.name in _USAGE]
    capacities = [_capacity_tokens(sample.labels) for sample in samples if sample.name == _CONFIG]
    known = [capacity for capacity in capacities if capacity]
    waiting = {sample.name: 0.0 for sample in samples if sample.name in _WAITING}
    for sample in samples:
        if sample.name in waiting:
            waiting[sample.name] += sample.value
    num_waiting = int(max(waiting.values())) if waiting else None  # one figure under two names
    return KvMetrics(max(usages, default=None), sum(known) or None, num_waiting)


def _samples(lines: Iterable[str]) -> list[Sample]:
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
    except ValueError:
        return []
    samples = (sample for family in families for sample in family.samples)
    return [sample for sample in samples if isfinite(sample.value) and sample.value >= 0]


def _capacity_tokens(labels: Mapping[str, str]) -> int | None:
    try:
        num_blocks, block_size = int(labels["num_gpu_blocks"]), int(labels["block_size"])
        return num_blocks * block_size if num_blocks > 0 and block_size > 0 else None
    except (KeyError, ValueError):
        return None
