"""What an installation sets for its pods: read from its file, and laid under what a manifest says."""

from pathlib import Path

import pytest

from kvasir_operator.api.defaults import (
    InstallationDefaults,
    NetworkPeer,
    PodDefaults,
    RouterDefaults,
    overlaid,
    read_defaults,
)
from kvasir_operator.api.model import EnvVar, ObjectRef, PodSpec, PodVolume, ResourcesSpec, RouterResources, Toleration
from kvasir_operator.api.quantity import Duration, Quantity
from kvasir_operator.errors import InvalidManifestError, UnreadableManifestError


def write(folder: Path, text: str) -> Path:
    file = folder / "pod-defaults.yaml"
    file.write_text(text)
    return file


def test_reads_kinds_of_pod_and_profiles_in_the_words_of_the_manifest(tmp_path: Path) -> None:
    defaults = read_defaults(
        write(
            tmp_path,
            """
            engine: {pod: {securityContext: {runAsUser: null}, imagePullSecrets: [{name: mirror}]}}
            router: {resources: {cpu: 2, memory: 1Gi}}
            profiles:
              h100:
                pod: {nodeSelector: {gpu: h100}, runtimeClassName: nvidia}
                resources: {accelerator: nvidia.com/gpu, memory: 128Gi}
            networkPeers: {metrics: [{namespaceLabels: {team: monitoring}}]}
            podMonitors: {interval: 10s}
            """,
        )
    )

    assert defaults.engine.pod == PodSpec(
        security_context={"runAsUser": None}, image_pull_secrets=(ObjectRef("mirror"),)
    )
    assert defaults.router == RouterDefaults(resources=RouterResources(cpu=Quantity("2"), memory=Quantity("1Gi")))
    assert defaults.profiles["h100"] == PodDefaults(
        PodSpec(node_selector={"gpu": "h100"}, runtime_class_name="nvidia"),
        ResourcesSpec(accelerator="nvidia.com/gpu", memory=Quantity("128Gi")),
    )
    assert defaults.network_peers.metrics == (NetworkPeer(namespace_labels={"team": "monitoring"}),)
    assert defaults.pod_monitors.interval == Duration("10s")


@pytest.mark.parametrize("text", ["", "# nothing\n", "engine:\nprofiles: {}\n"])
def test_a_file_that_says_nothing_sets_nothing(tmp_path: Path, text: str) -> None:
    assert read_defaults(write(tmp_path, text)) == InstallationDefaults()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engines: {}", "engines: unknown field, expected one of engine, gateway, networkPeers, podMonitors, profiles"),
        ("gateway: {name: shared, podLabels: {a: b}}", "gateway.namespace: missing"),
        ("engine: {pod: {node: x}}", "engine.pod.node: unknown field"),
        ("router: {pod: {tolerations: [{operator: Is}]}}", "router.pod.tolerations[0].operator: str 'Is', expected"),
        ("profiles: {a: {resources: {cpu: lots}}}", "profiles.a.resources.cpu: 'lots' is not a quantity"),
        ("profiles: {a: {pod: {labels: {serving.kvasir.dev/role: x}}}}", "profiles.a.pod: labels under"),
        ("profiles: {A_1: {}}", "profiles.A_1: no manifest can name it"),
        ("profiles: {a: {resources: {profile: b}}}", "profiles.a.resources.profile: profiles do not build on one"),
        ("engine: {resources: {profile: b}}", "engine.resources.profile: profiles do not build on one"),
        ("router: {resources: {accelerator: nvidia.com/gpu}}", "router.resources.accelerator: unknown field"),
        ("[]", "list [], expected a mapping"),
        ("{}\n---\n{}", "2 documents, expected one"),
    ],
)
def test_refuses_with_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(InvalidManifestError) as refusal:
        read_defaults(file)

    assert f"{file}: {message}" in str(refusal.value)


def test_refuses_a_file_that_is_no_yaml_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnreadableManifestError, match="key 'engine' appears twice"):
        read_defaults(write(tmp_path, "engine: {}\nengine: {}"))
    with pytest.raises(UnreadableManifestError, match="cannot be read: No such file"):
        read_defaults(tmp_path / "gone.yaml")


def test_what_is_laid_over_wins_field_by_field() -> None:
    base = PodSpec(image="a", scheduler_name="x", node_selector={"a": "1", "b": "1"}, security_context={"runAsUser": 1})
    over = PodSpec(image="b", node_selector={"b": "2"}, security_context={"runAsUser": None})

    assert overlaid(base, over) == PodSpec(
        image="b", scheduler_name="x", node_selector={"a": "1", "b": "2"}, security_context={"runAsUser": None}
    )


def test_lists_are_joined_and_of_equal_names_the_later_wins() -> None:
    a, b, mine = EnvVar("A", "1"), EnvVar("B", "1"), EnvVar("A", "2")
    one, other = PodVolume("/ca", secret=ObjectRef("one")), PodVolume("/ca", secret=ObjectRef("other"))
    everywhere = Toleration(operator="Exists")
    base = PodSpec(env=(a, b), volumes=(one,), tolerations=(everywhere,))

    assert overlaid(base, PodSpec(env=(mine,), volumes=(other,), tolerations=(everywhere,))) == PodSpec(
        env=(b, mine), volumes=(other,), tolerations=(everywhere,)
    )
