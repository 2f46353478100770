"""A model service as the router knows it: its engines, the requests in flight there, and what it answers for."""
