"""Kvasir."""
