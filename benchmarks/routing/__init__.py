"""Routing rules beside one another in virtual time, on request traces in Mooncake's format."""
