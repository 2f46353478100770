"""How many replicas a role wants by its demand: read from Prometheus, decided purely, handed to the reconciler.

demand sizes, latency guards, forecast looks ahead, behavior paces, decide tells the story of a role and together that
of a service; only prometheus and loop touch a network or a clock. PromQL is in queries alone.
"""
