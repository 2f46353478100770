"""Verdict by traffic: a tenant that floods the service does not make another one wait."""

from pathlib import Path

import yaml
from e2e.conftest import Deploy, StartLoad
from e2e.live_cluster import LiveCluster
from e2e.traffic.answers import answers
from e2e.traffic.traffic import Load, Outcome, Verdict
from e2e.verdicts import Verdicts

MANIFEST = Path(__file__).parent / "service.yaml"
QUIET, FLOODING = "key-of-the-quiet-one", "key-of-the-flooding-one"
NUM_QUIET_CLIENTS = 2
NUM_ROUNDS, NUM_STREAMS = 3, 200
"""Streams alone and as many beside the flood, in turn, so that what else the machine does tells on both alike; the 99th
percentile is the sixth worst of each."""
LIMIT_SECONDS = 240.0
NUM_FLOODING_CLIENTS = 12
MOST_TIMES_SLOWER = 1.5


def test_a_tenant_that_floods_does_not_make_another_one_wait(
    live_cluster: LiveCluster, deploy: Deploy, own_namespace: str, start_load: StartLoad, verdicts: Verdicts
) -> None:
    write_keys(live_cluster, own_namespace)
    service = deploy(MANIFEST)
    service.wait_ready()
    short, long, flooding = answers(10), answers(150), bearer(FLOODING)
    alone: list[Outcome] = []
    beside: list[Outcome] = []
    with start_load(service, short, num_clients=NUM_QUIET_CLIENTS, name="quiet", headers=bearer(QUIET)) as quiet:
        for number in range(NUM_ROUNDS):
            alone += window(quiet)
            name = f"flooding-{number}"
            with start_load(service, long, num_clients=NUM_FLOODING_CLIENTS, name=name, headers=flooding) as flood:
                beside += window(quiet)
                flood.stop()
        of_all = quiet.stop()
    without, within = (Verdict(tuple(each)).first_token_p99_seconds for each in (alone, beside))
    note = f"p99 of the time to the first token {1000 * within:.0f} ms, alone {1000 * without:.0f} ms"
    verdicts.add("tenants: one beside another that floods", of_all, note)
    assert not of_all.failures, of_all
    assert within < MOST_TIMES_SLOWER * without, note


def window(load: Load) -> list[Outcome]:
    """The next streams to begin, and to end."""
    begin = max(each.ended for each in load.outcomes())
    load.wait_streams(NUM_QUIET_CLIENTS + NUM_STREAMS, LIMIT_SECONDS)
    return [each for each in load.outcomes() if each.started >= begin]


def write_keys(cluster: LiveCluster, namespace: str) -> None:
    values = {"quiet": QUIET, "flooding": FLOODING}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tenants"}, "stringData": values}
    cluster.kubectl("apply", "--server-side", f"--namespace={namespace}", "-f", "-", text=yaml.safe_dump(secret))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
