"""What an engine pod asks the node for: CPU, memory, accelerators, shared memory."""

from typing import Any

from kvasir_operator.api.model import DEFAULT_ACCELERATOR, NO_ACCELERATOR, ParallelismSpec, ResourcesSpec, ServiceSpec


def engine_resources(spec: ServiceSpec) -> dict[str, Any]:
    """Requests equal limits: the engine sizes its threads and its KV cache by what it may use at most."""
    resources, parallelism = _of_the_role(spec)
    amounts = {
        name: value.text for name, value in (("cpu", resources.cpu), ("memory", resources.memory)) if value is not None
    }
    accelerator = _accelerator(spec, resources)
    if accelerator is not None:
        amounts[accelerator] = str(num_accelerators(parallelism))
    return {"requests": amounts, "limits": amounts} if amounts else {}


def num_accelerators(parallelism: ParallelismSpec) -> int:
    """Accelerators of one pod: pipeline stages are pods of their own."""
    return parallelism.tensor * parallelism.data


def shared_memory(spec: ServiceSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and mounts of /dev/shm; none where the manifest leaves its size to the container runtime."""
    size = _of_the_role(spec)[0].shared_memory
    if size is None:
        return [], []
    volume = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size.text}}
    return [volume], [{"name": "shared-memory", "mountPath": "/dev/shm"}]


def _accelerator(spec: ServiceSpec, resources: ResourcesSpec) -> str | None:
    if resources.accelerator is None:
        return None if spec.engine.device == "cpu" else DEFAULT_ACCELERATOR
    return None if resources.accelerator == NO_ACCELERATOR else resources.accelerator


def _of_the_role(spec: ServiceSpec) -> tuple[ResourcesSpec, ParallelismSpec]:
    """Decode's where the service is split, because one role stands in for both until they are acted on."""
    if spec.disaggregation is not None:
        decode = spec.disaggregation.decode
        return decode.resources or ResourcesSpec(), decode.parallelism
    return spec.resources or ResourcesSpec(), spec.parallelism
