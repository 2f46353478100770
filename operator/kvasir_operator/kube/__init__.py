"""The API server: client, kinds, Lease."""
