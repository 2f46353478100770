"""Everything a service should have in the cluster, computed from its manifest alone (pure functions)."""

from kvasir_operator.desired.objects import desired_objects
from kvasir_operator.desired.revision import revision_of
from kvasir_operator.desired.unsupported import UnsupportedFeature, unsupported_features

__all__ = ["UnsupportedFeature", "desired_objects", "revision_of", "unsupported_features"]
