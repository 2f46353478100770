"""Which promtool and Prometheus tests run: the machine's own where there is one, and nothing is fetched then."""

from pathlib import Path

import pytest
from e2e.cluster.rig import debian
from e2e.cluster.rig.debian import prometheus_program, promtool_program


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Debian's programs, as an earlier run has left it."""
    folder = tmp_path / "cache" / "prometheus-debian" / "usr" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(debian, "CACHE", tmp_path / "cache")
    return folder


def test_an_installed_one_comes_first(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("promtool", "prometheus"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (promtool_program(), prometheus_program()) == (tmp_path / "promtool", tmp_path / "prometheus")


def test_without_one_debians_is_taken(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (promtool_program(), prometheus_program()) == (unpacked / "promtool", unpacked / "prometheus")
