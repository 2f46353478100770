"""Autoscaling rules over request traces in virtual time: how many replicas they take to keep how many promises."""
