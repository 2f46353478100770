"""Others' rules, from their documents and sources as of 2026-08; their thresholds are parameters, to be swept."""
