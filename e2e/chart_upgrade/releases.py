"""The chart of an earlier release, made from the present one: an older CRD, another runtime image.

Its runtime image has the present one's layers and another label, because a checkout has the code of one release only.
"""

import shutil
from pathlib import Path
from typing import Any

import yaml
from e2e.helm.helm import CHART

NEW_FIELD = "historyLimit"
"""A field of `spec.rollout` that the earlier CRD does not know. It shapes no pod."""


def earlier_engine(version: str) -> str:
    """The value of the chart for its runtime image, as `e2e/cluster/images` names it."""
    return f"--set=images.runtime.tag={version}-earlier"


def previous_chart(directory: Path) -> Path:
    chart = directory / "previous"
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about | {"version": "0.0.1"}))
    [crd] = (chart / "files" / "crds").iterdir()
    crd.write_text(yaml.safe_dump(_without_new_field(yaml.safe_load(crd.read_text()))))
    return chart


def _without_new_field(crd: dict[str, Any]) -> dict[str, Any]:
    [version] = crd["spec"]["versions"]
    rollout = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["rollout"]
    del rollout["properties"][NEW_FIELD]
    return crd
