"""Kvasir's router: one OpenAI endpoint in front of engine replicas, each request goes where prefill ends first."""
