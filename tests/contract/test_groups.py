"""The pods of a group, as the engine reads their flags: each has its own run of the ranks, and a device for each."""

from itertools import product

import pytest
from tests.contract.rendered import FIELDS, SETTINGS, runtime_config, runtime_configs, service_with

from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.desired.unsupported import unsupported_features
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_runtime.config_checks import check_values
from kvasir_runtime.parallel.topology import RankPlace
from kvasir_runtime.ranks.start import topology_of


@pytest.mark.parametrize(
    ("degrees", "most", "num_pods"),
    [
        ({"tensor": 2}, 4, 1),
        ({"tensor": 4}, 4, 1),
        ({"tensor": 8}, 4, 2),
        ({"tensor": 2}, 1, 2),
        ({"tensor": 8, "expert": True}, 2, 4),
        ({"tensor": 4, "pipeline": 3}, 2, 6),
        ({"tensor": 2, "pipeline": 2}, 4, 2),
        ({"tensor": 2, "pipeline": 2, "data": 2}, 4, 2),
        ({"tensor": 2, "pipeline": 2, "data": 2}, 3, 4),
        ({"tensor": 4, "pipeline": 2, "data": 2}, 2, 8),
        ({"tensor": 2, "data": 4}, 4, 2),
    ],
)
def test_pods_share_out_the_ranks_of_a_replica_and_hold_a_device_for_each(
    degrees: dict[str, int], most: int, num_pods: int
) -> None:
    service = service_with(
        model={"source": "pvc://m/big"}, parallelism=degrees, resources={"maxDevices": most, "cpu": 1, "memory": "1Gi"}
    )
    [role] = engine_roles(service, SETTINGS.defaults)
    template = engine_pod_template(service, role, SETTINGS)
    pods: list[list[RankPlace]] = []
    for node in range(role.num_nodes):
        config = runtime_config(template, FIELDS | {"KVASIR_NODE_RANK": str(node)})
        check_values(config)
        engines = [topology_of(config.parallel, rank) for rank in range(config.parallel.data_parallel_size)]
        pods.append([place for engine in engines for place in engine.places(config.parallel.node_rank)])

    assert len(pods) == num_pods
    ranks = sorted((place.topology.data_rank, place.rank) for pod in pods for place in pod)
    assert ranks == [*product(range(degrees.get("data", 1)), range(pods[0][0].topology.num_ranks))]
    assert all(len({place.pipeline_rank for place in pod}) == 1 for pod in pods)
    assert all(sorted(place.local_rank for place in pod) == list(range(len(pod))) for pod in pods)
    assert all(place.tensor_group_shares_a_node for pod in pods for place in pod) == (degrees["tensor"] <= most)
    [container] = template["spec"]["containers"]
    assert {container["resources"]["limits"]["nvidia.com/gpu"]} == {str(len(pod)) for pod in pods}


def test_stages_of_prefill_and_decode_are_cut_alike_and_tell_one_another_where_they_are() -> None:
    size = {"maxDevices": 2, "cpu": 1, "memory": "1Gi"}
    degrees = {"prefill": {"tensor": 2, "pipeline": 2}, "decode": {"pipeline": 2}}
    split = {role: {"parallelism": parallelism, "resources": size} for role, parallelism in degrees.items()}
    service = service_with(model={"source": "pvc://m/big"}, disaggregation=split)
    assert not unsupported_features(service)
    prefill, decode = runtime_configs(service)
    for config, tensor_size in ((prefill, 2), (decode, 1)):
        check_values(config)
        topology = topology_of(config.parallel, data_rank=0)
        assert (topology.tensor_size, topology.pipeline_size, topology.num_nodes) == (tensor_size, 2, 2)
        assert config.cache.kv_transfer_config is not None
        extra = config.cache.kv_transfer_config.kv_connector_extra_config
        assert (extra.side_channel_host, extra.revision) == (FIELDS["POD_IP"], FIELDS["KVASIR_REVISION"])
