"""The chart of an earlier release, made from the present one: an older CRD and an operator with other flags.

Its images are the present ones, because a machine that builds from this checkout has no others.
"""

import shutil
from pathlib import Path
from typing import Any

import yaml
from e2e.helm.helm import CHART

NEW_FIELD = "maxSurge"
"""A field of `spec.rollout` that the earlier CRD does not know. It shapes no pod."""


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
    del rollout["x-kubernetes-validations"]  # it speaks of the field
    return crd
