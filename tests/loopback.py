"""Loopback addresses of this process alone, so that tests can run in several processes side by side."""

import os


def own_host(number: int) -> str:
    """127.x.y.number, `number` from 1 to 254; the same for the same number."""
    return f"127.{1 + os.getpid() // 254 % 254}.{1 + os.getpid() % 254}.{number}"
