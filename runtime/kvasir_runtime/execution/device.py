"""The device that a rank computes on: which one, its float types and its memory."""

import os
import resource
from pathlib import Path

import torch

from kvasir_runtime.checkpoint_json import shortened
from kvasir_runtime.config import Device, DType
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.parallel.topology import RankPlace

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CGROUP = Path("/sys/fs/cgroup")


def select_device(name: Device, place: RankPlace | None = None) -> torch.device:
    """The device of that name; `auto`: cuda when there is one. Of several ranks on a node each gets a GPU of its
    own, which becomes this thread's current one. Raises ConfigurationError."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device 'cuda': no CUDA device is visible; use --device cpu or give the process a GPU")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu" or place is None or place.topology.local_world_size == 1:
        return torch.device(name)
    num_needed, num_there = place.topology.local_world_size, torch.cuda.device_count()
    if num_needed > num_there:
        raise ConfigurationError(
            f"{num_needed} ranks on this node need as many GPUs, but {num_there} are visible: lower "
            "--tensor-, --pipeline- or --data-parallel-size, or spread them over more --nnodes"
        )
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def select_dtype(name: DType, declared: str | None) -> torch.dtype:
    """The type asked for; `auto`: the checkpoint's, float32 where it names none. Raises ConfigurationError."""
    chosen = (declared or "float32") if name == "auto" else name
    if chosen not in _DTYPES:
        where = "of the checkpoint's config.json " if name == "auto" else ""
        known = ", ".join(_DTYPES)
        raise ConfigurationError(f"dtype {shortened(chosen)} {where}is not supported; pass --dtype with one of {known}")
    return _DTYPES[chosen]


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: its affinity, cut to the container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup)
    return cores if quota is None else max(1, min(cores, int(quota)))


def memory_limit_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory of the machine, or where that is less `ulimit -m` or the container's limit (cgroup v2, then v1)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    resident, _ = resource.getrlimit(resource.RLIMIT_RSS)
    if resident != resource.RLIM_INFINITY:
        total = min(total, resident)
    for file in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes", cgroup / "memory.limit_in_bytes"):
        limit = _read(file)
        if limit is not None and limit != "max":
            return min(total, int(limit))
    return total


def resident_bytes() -> int:
    """Anonymous memory of this process now; pages of mapped files can be dropped and do not count."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024


def _cpu_quota(cgroup: Path) -> float | None:
    """Cores' worth of CPU time per period, if limited."""
    unified = _read(cgroup / "cpu.max")
    if unified is not None:
        quota, period = unified.split()
        return None if quota == "max" else int(quota) / int(period)
    first = _read(cgroup / "cpu" / "cpu.cfs_quota_us")
    if first is None or int(first) <= 0:
        return None
    return int(first) / int(_read(cgroup / "cpu" / "cpu.cfs_period_us") or 100_000)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
