"""Where a workload has the template of its pods."""

from kvasir_operator.kube.kinds import LEADER_WORKER_SET, KubeObject, kind_of


def pod_template(workload: KubeObject) -> KubeObject:
    """Of a LeaderWorkerSet of ours leader and workers have one."""
    spec = workload["spec"]
    is_led = kind_of(workload) == LEADER_WORKER_SET
    template: KubeObject = spec["leaderWorkerTemplate"]["workerTemplate"] if is_led else spec["template"]
    return template
