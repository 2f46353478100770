"""Admission: who waits, whose turn it is, and who is refused."""
