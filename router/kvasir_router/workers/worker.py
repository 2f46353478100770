"""One of several router processes behind one port: `python -m kvasir_router.workers.worker`, run by the supervisor.

Its standard input brings the configuration and ends when the supervisor does, upon which it drains as on SIGTERM; its
standard output tells where its own admin port is, once it serves.
"""

import asyncio
import dataclasses
import os
import pickle
import signal
import sys

from kvasir_router import server
from kvasir_router.config import RouterConfig
from kvasir_router.errors import StartupError
from kvasir_router.server import RunningRouter

_LOOPBACK = "127.0.0.1"


def config_of_worker(config: RouterConfig, port: int) -> RouterConfig:
    """What is for the router as a whole is divided: limits of tenants, connections, and bytes of bodies.

    Every worker may hold one body of the largest size, even where all together then hold more than the router may. None
    has a port of its own at which peers could hear it.
    """
    num = config.workers

    def divided(limit: int | None) -> int | None:
        return None if limit is None else max(limit // num, 1)

    return dataclasses.replace(
        config,
        port=port,
        admin_host=_LOOPBACK,
        admin_port=0,
        peers=None,
        tenant_tokens_per_minute=divided(config.tenant_tokens_per_minute),
        tenant_max_in_flight=divided(config.tenant_max_in_flight),
        max_connections=max(config.max_connections // num, 1),
        max_held_body_size=max(config.max_held_body_size // num, config.max_body_size),
    )


def main() -> int:
    config: RouterConfig = pickle.load(sys.stdin.buffer)
    try:
        server.run(config, on_serving=_tell_supervisor)
    except StartupError as error:
        print(f"kvasir-router: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _tell_supervisor(router: RunningRouter) -> None:
    print(router.admin_url, flush=True)
    loop = asyncio.get_running_loop()
    supervisor = sys.stdin.fileno()

    def supervisor_ended() -> None:
        loop.remove_reader(supervisor)
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(supervisor, supervisor_ended)


if __name__ == "__main__":
    sys.exit(main())
