"""What /debug/routing shows of the router at work: its replicas, and its last decisions with their costs."""
