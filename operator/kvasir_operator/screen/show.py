"""`kvasir-operator status`: draws a service once, or every other second, on a terminal or as plain text."""

import asyncio
import signal
from contextlib import nullcontext, suppress
from datetime import UTC, datetime

from rich.console import Console
from rich.live import Live

from kvasir_operator.errors import KubeUnavailableError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.configuration import load_configuration
from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.screen.draw import draw, text_of
from kvasir_operator.screen.read import Snapshot, follow, read


def show_status(key: ServiceKey, kubeconfig: str | None, is_watched: bool) -> None:
    """Returns when it is drawn; where it is watched, at SIGINT. Raises KvasirOperatorError."""
    with suppress(KeyboardInterrupt) if is_watched else nullcontext():
        asyncio.run(_show_status(key, kubeconfig, is_watched, Console()))


async def _show_status(key: ServiceKey, kubeconfig: str | None, is_watched: bool, console: Console) -> None:
    configuration = await load_configuration(kubeconfig)
    client = KubeClient(configuration)
    try:
        if not is_watched:
            _print(console, await read(client, key))
        elif console.is_terminal:
            await _redraw(client, key, console)
        else:
            await _print_each(client, key, console)
    except KubeUnavailableError as error:
        advice = "is it up, and are these its address and credentials? --kubeconfig FILE takes others"
        raise KubeUnavailableError(f"{configuration.host}: {error}; {advice}", error.status) from error
    finally:
        await client.close()


async def _redraw(client: KubeClient, key: ServiceKey, console: Console) -> None:
    """On a screen of its own, which is gone at the end."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, live.refresh)
        async for snapshot in follow(client, key):
            live.update(draw(snapshot, datetime.now(UTC)), refresh=True)


async def _print_each(client: KubeClient, key: ServiceKey, console: Console) -> None:
    """After each change, under a line with the time."""
    shown: Snapshot | None = None
    async for snapshot in follow(client, key):
        if snapshot != shown:
            print(f"--- {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
            _print(console, snapshot)
        shown = snapshot


def _print(console: Console, snapshot: Snapshot) -> None:
    now = datetime.now(UTC)
    if console.is_terminal:
        console.print(draw(snapshot, now))
    else:
        print(text_of(snapshot, now), end="", flush=True)
