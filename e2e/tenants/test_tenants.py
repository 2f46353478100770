"""Verdict by traffic: a tenant that floods the service does not make another one wait."""

from pathlib import Path

import yaml
from e2e.conftest import Deploy, StartLoad
from e2e.live_cluster import LiveCluster
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts

MANIFEST = Path(__file__).parent / "service.yaml"
QUIET, FLOODING = "key-of-the-quiet-one", "key-of-the-flooding-one"
NUM_QUIET_CLIENTS, NUM_STREAMS = 2, 150
LIMIT_SECONDS = 240.0
NUM_FLOODING_CLIENTS = 12
MOST_TIMES_SLOWER = 1.5


def test_a_tenant_that_floods_does_not_make_another_one_wait(
    live_cluster: LiveCluster, deploy: Deploy, own_namespace: str, start_load: StartLoad, verdicts: Verdicts
) -> None:
    write_keys(live_cluster, own_namespace)
    service = deploy(MANIFEST)
    service.wait_ready()
    short, long = answers(10), answers(150)
    with start_load(service, short, num_clients=NUM_QUIET_CLIENTS, name="quiet-alone", headers=bearer(QUIET)) as quiet:
        quiet.wait_streams(NUM_STREAMS, LIMIT_SECONDS)
        alone = quiet.stop()
    flood = start_load(service, long, num_clients=NUM_FLOODING_CLIENTS, name="flooding", headers=bearer(FLOODING))
    with (
        flood,
        start_load(service, short, num_clients=NUM_QUIET_CLIENTS, name="quiet-beside", headers=bearer(QUIET)) as quiet,
    ):
        quiet.wait_streams(NUM_STREAMS, LIMIT_SECONDS)
        beside = quiet.stop()
    without, within = alone.first_token_p99_seconds, beside.first_token_p99_seconds
    note = f"p99 of the time to the first token {1000 * within:.0f} ms, alone {1000 * without:.0f} ms"
    verdicts.add("tenants: one beside another that floods", beside, note)
    assert not alone.failures, alone
    assert not beside.failures, beside
    assert within < MOST_TIMES_SLOWER * without, note


def write_keys(cluster: LiveCluster, namespace: str) -> None:
    values = {"quiet": QUIET, "flooding": FLOODING}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tenants"}, "stringData": values}
    cluster.kubectl("apply", "--server-side", f"--namespace={namespace}", "-f", "-", text=yaml.safe_dump(secret))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
