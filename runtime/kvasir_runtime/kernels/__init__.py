"""The engine's numeric kernels: each fast version beside its plain torch twin.

`ops.py` gathers one implementation of every kernel for the decoder; nothing here knows about requests or models.
"""
