"""Replicas of several pods: which of them there are, when they are restarted as a whole, and which nodes they avoid."""
