"""Which engines exist: fixed by flags, or followed through the Kubernetes API."""
