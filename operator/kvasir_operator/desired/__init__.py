"""Everything a service should have in the cluster, computed from its manifest and the settings (pure functions)."""
