"""What an engine pod asks the node for: CPU, memory, accelerators, further resources, claims, shared memory."""

from typing import Any, Final, Literal

from kvasir_operator.api.fields import as_manifest
from kvasir_operator.api.model import DEFAULT_ACCELERATOR, NO_ACCELERATOR
from kvasir_operator.api.quantity import Quantity, at_most
from kvasir_operator.desired.roles import EngineRole

# Without requests a pod is BestEffort, the first that its node evicts. The smallest nodes with one accelerator that
# clouds rent have 4 CPUs and 16 GiB (g4dn.xlarge, g5.xlarge, g2-standard-4) and keep some for themselves: these fit
# there, and on a large node take no more than belongs to the accelerators.
_CPUS_PER_ACCELERATOR: Final = 3
_MEMORY_GIB_PER_ACCELERATOR: Final = 12
# Ranks exchange tensors through it where their devices cannot reach one another; container runtimes give 64Mi.
_SHARED_MEMORY_GIB_PER_RANK: Final = 1
_NVIDIA: Final = "nvidia.com/"


def engine_resources(role: EngineRole) -> dict[str, Any]:
    """Requests equal limits but for cpuLimit: the engine sizes its threads and its KV cache by what it may use."""
    given = {"cpu": role.resources.cpu, "memory": role.resources.memory, **role.resources.extra}
    given.pop(accelerator(role) or "", None)  # its number follows from the ranks
    said = {name: value for name, value in given.items() if value is not None}
    amounts = {name: value.text for name, value in (_defaults(role) | said).items()}
    most_cpu = role.resources.cpu_limit
    limits = amounts if most_cpu is None else amounts | {"cpu": most_cpu.text}
    result: dict[str, Any] = {name: each for name, each in (("requests", amounts), ("limits", limits)) if each}
    if role.resources.claims:
        result["claims"] = [{"name": claim.name} for claim in role.resources.claims]
    return result


def loader_resources(role: EngineRole) -> dict[str, Any]:
    """Of a container that runs before the engine: as much as that, so a pod needs no more, but for what computes."""
    return {
        kind: amounts
        for kind, asked in engine_resources(role).items()
        if kind != "claims" and (amounts := {name: asked[name] for name in ("cpu", "memory") if name in asked})
    }


def resource_claims(role: EngineRole) -> list[dict[str, Any]]:
    """The pod's claims of dynamic resource allocation, as the manifest has them."""
    claims: list[dict[str, Any]] = as_manifest(role.resources.claims)
    return claims


def shared_memory(role: EngineRole) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and mounts of /dev/shm; none where one rank is content with what the container runtime gives."""
    size = _shared_memory_size(role)
    if size is None:
        return [], []
    volume = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    return [volume], [{"name": "shared-memory", "mountPath": "/dev/shm"}]


def _defaults(role: EngineRole) -> dict[str, Quantity]:
    name = accelerator(role)
    if name is None:
        return {}
    count = role.ranks_per_pod
    cpu = at_most(Quantity(f"{_CPUS_PER_ACCELERATOR * count}"), role.resources.cpu_limit)
    memory = Quantity(f"{_MEMORY_GIB_PER_ACCELERATOR * count}Gi")
    return {"cpu": cpu, "memory": memory, name: Quantity(f"{count}")}


def _shared_memory_size(role: EngineRole) -> str | None:
    if role.resources.shared_memory is not None:
        return role.resources.shared_memory.text
    num_ranks = role.tensor_ranks_per_pod
    return f"{_SHARED_MEMORY_GIB_PER_RANK * num_ranks}Gi" if num_ranks > 1 else None


def accelerator(role: EngineRole) -> str | None:
    """The resource's name; None for a role that computes on CPUs, or gets its devices by `resources.claims`."""
    named = role.resources.accelerator or DEFAULT_ACCELERATOR
    # A profile or the installation may name one for a service that leaves it unused.
    return None if named == NO_ACCELERATOR or role.engine.device == "cpu" else named


def device(role: EngineRole) -> Literal["auto", "cuda", "cpu"]:
    """`cuda` wherever NVIDIA's devices are asked for, whole or in parts.

    With `auto` an engine that cannot use the device it holds would compute on CPUs in silence.
    """
    named = accelerator(role)
    if role.engine.device == "auto" and named is not None and named.startswith(_NVIDIA):
        return "cuda"
    return role.engine.device
