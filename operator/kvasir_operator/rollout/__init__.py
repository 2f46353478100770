"""Replicas between revisions: how pods go from former revisions to the current one, and which of them go first.

`observe_workloads` reads what there is, `plan_rollout` decides, `apply/` writes.
"""
