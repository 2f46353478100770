"""One API process from start to end: load the tokenizer, serve, drain, stop.

`listen` comes first and apart, so that a port in use is told before anything is loaded, and several processes can share
one socket. The process ends with 0 after a drain that it was asked for and with 1 when the engine core has died.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.middleware.cors import CORSMiddleware

from kvasir_http.connections import ConnectionLimits, Connections, most_descriptors
from kvasir_http.http_protocol import BoundedHttpProtocol
from kvasir_http.sockets import BACKLOG, bound_socket
from kvasir_runtime.config import CacheConfig, RuntimeConfig, ServerConfig
from kvasir_runtime.engine.async_engine import AsyncEngine
from kvasir_runtime.engine.channel import EngineChannel
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import ConfigurationError, ServerUnavailableError
from kvasir_runtime.heartbeat import BEAT_SECONDS, Heartbeats, api_heartbeats
from kvasir_runtime.metrics import EngineView, MetricsCollector
from kvasir_runtime.parallel.counts import CollectiveTotals
from kvasir_runtime.pooling.description import describe_pooling
from kvasir_runtime.request_metrics import RequestMetrics, request_rows
from kvasir_runtime.server.admission import API_LIMITS, Admission, ApiLimits, BodyBudget
from kvasir_runtime.server.answer_formats import answer_formats
from kvasir_runtime.server.app import create_app
from kvasir_runtime.server.background import BackgroundTasks
from kvasir_runtime.server.control import sleep_refusals
from kvasir_runtime.server.middleware import REQUEST_ID_HEADER, RequestLog
from kvasir_runtime.server.model_digest import model_digest
from kvasir_runtime.server.pair_prompts import pair_prompt_of
from kvasir_runtime.server.probes import POLLED_PATHS, Probes, until_hung
from kvasir_runtime.server.prompts import PromptBuilder, load_chat_template
from kvasir_runtime.server.resolving import load_sampling_defaults
from kvasir_runtime.server.response_store import ResponseStore
from kvasir_runtime.server.serving import Serving
from kvasir_runtime.server.structured import Grammars
from kvasir_runtime.server.tokenizer_description import TokenizerDescription
from kvasir_runtime.service_secret import service_secret
from kvasir_runtime.shared_rows import SharedRows

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "KVASIR_API_KEY"
MOST_KEPT_SECONDS = 10.0
"""How long blocks are kept for other engines after the last answer: a pod's grace ends some time after its drain."""
LAST_ANSWERS_SECONDS = 2.0
"""How long requests may take to be answered with an error after the engine has died or the time to drain is over."""


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, to be handed to every API process; `::` is every address of the machine, IPv6 and IPv4.

    Raises ConfigurationError when it cannot be had.
    """
    try:
        listener = bound_socket(host, port)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {written(host, port)}: {error.strerror}; stop what uses it or choose another --port or "
            "--host"
        ) from error
    return listener


def written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run_api_server(config: RuntimeConfig, api_index: int, sockets: list[socket.socket], ipc_dir: Path) -> int:
    """Serve until SIGTERM or SIGINT, then drain (a second signal ends at once). Returns the exit code."""

    async def run() -> int:
        server = ApiServer(config, api_index, sockets, ipc_dir)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        return await server.run()

    return uvloop.run(run())


class ApiServer:
    """To be made and run on one event loop."""

    def __init__(
        self,
        config: RuntimeConfig,
        api_index: int,
        sockets: list[socket.socket],
        ipc_dir: Path,
        limits: ApiLimits = API_LIMITS,
    ) -> None:
        """Raises ModelLoadError or ConfigurationError when tokenizer or chat template cannot be had."""
        self._sockets = sockets
        self._address = written(*sockets[0].getsockname()[:2]) if api_index == 0 else None
        self._shutdown_delay = config.server.shutdown_delay
        self._shutdown_timeout = config.server.shutdown_timeout
        transfer = config.cache.kv_transfer_config
        lease_seconds = 0.0 if transfer is None else transfer.kv_connector_extra_config.lease_seconds
        self._kept_seconds = min(lease_seconds, MOST_KEPT_SECONDS)
        self._is_stopping = asyncio.Event()
        self._is_hurried = asyncio.Event()
        tokenizer = Tokenizer.load(Path(config.model.tokenizer or config.model.model))
        api_server_count = config.server.api_server_count
        rows = request_rows(ipc_dir, api_server_count)
        self.admission = Admission(ipc_dir, api_server_count, api_index, config.server.max_sequences_in_flight)
        num_cores = config.parallel.data_parallel_size
        self._channels = [EngineChannel(ipc_dir, api_index, data_rank) for data_rank in range(num_cores)]
        request_metrics = RequestMetrics(rows.row(api_index))
        self.engine = AsyncEngine(self._channels, tokenizer, request_metrics, api_index=api_index)
        self._heartbeats = api_heartbeats(ipc_dir, api_server_count, num_cores, api_index)
        self._response_store = ResponseStore(ipc_dir / "responses", config.server.response_store_bytes)
        self._background = BackgroundTasks(self.admission)
        serving = _serving(
            config, self.engine, self.admission, tokenizer, self._response_store, self._background, limits.body_seconds
        )
        self._grammars = serving.grammars
        collectives = CollectiveTotals(ipc_dir, config.parallel.data_parallel_size)
        self._probes = probes = Probes(
            self.engine,
            self.admission,
            _registry(config, serving.model_names[0], rows, self.engine, self.admission, collectives),
            self._heartbeats,
            config.server.stall_seconds,
            can_migrate=config.cache.kv_transfer_config is not None,
            max_body_seconds=limits.body_seconds,
            sleep_refusals=sleep_refusals(config),
        )
        api_key = config.server.api_key or os.environ.get(API_KEY_VARIABLE) or None
        router_secret = service_secret(os.environ)
        app = create_app(
            serving,
            probes,
            self.admission,
            BodyBudget(max(limits.held_bytes, 2 * config.server.max_body_bytes)),
            api_key=api_key,
            router_secret=router_secret,
            kv_transfer_trust_clients=config.cache.kv_transfer_trust_clients,
            shows_tokenizer_info=config.server.enable_tokenizer_info_endpoint,
        )
        _allow_browsers(app, config.server)
        wanted = ConnectionLimits(config.server.max_connections, config.server.max_connections_per_peer)
        self._connections = Connections(wanted.within(most_descriptors()))
        logged = RequestLog(app, request_metrics, POLLED_PATHS)
        self._server = _HttpServer(_uvicorn_config(logged, self._connections, limits), self._heartbeats)

    def stop(self) -> None:
        """First drain; called again, end at once."""
        if self._is_stopping.is_set():
            self._is_hurried.set()
        self._is_stopping.set()

    async def run(self) -> int:
        """Until `stop` or the engine's death. Returns the exit code."""
        if self._address is not None:
            logger.info("listening on http://%s; /openapi.json lists what is served", self._address)
        gc.collect()
        gc.freeze()  # what loading left behind is not walked again while requests wait
        engine_task = asyncio.create_task(self.engine.run())
        server_task = asyncio.create_task(self._server.serve(self._sockets))
        stop_task = asyncio.create_task(self._is_stopping.wait())
        try:
            await asyncio.wait((engine_task, server_task, stop_task), return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            stop_task.cancel()
            self._server.stop()
            await server_task
            await self._background.close()
            engine_task.cancel()
            await asyncio.gather(engine_task, stop_task, return_exceptions=True)
            for channel in self._channels:
                channel.close()
            self._response_store.close()
            self._grammars.close()
            self._heartbeats.leave()
        return 1 if self.engine.dead is not None else 0

    async def _drain(self) -> None:
        """Answer what is and will be asked, as long as that may take; what is left then is given up."""
        self.admission.start_drain()
        self._connections.start_drain()
        if self.engine.dead is not None:
            logger.error("%s", self.engine.dead)
        else:
            logger.info("draining: %d requests in flight", self.admission.num_in_flight)
            hung = until_hung(self._probes.check_health)
            await self._wait_any(self._shutdown_timeout, self._answer_all(), self._is_hurried.wait(), hung)
            self.engine.give_up(ServerUnavailableError("the server stops and cannot wait any longer for this answer"))
            await self._wait_any(self._kept_seconds, self.engine.wait_until_pulled(), self._is_hurried.wait())
        await self._wait_any(LAST_ANSWERS_SECONDS, self.admission.wait_idle())

    async def _answer_all(self) -> None:
        """Half of the time is for what is still asked, so that the answers which then begin have the other half."""
        if not self.admission.is_refusing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._shutdown_timeout / 2):
                    await self._connections.until_quiet(self._shutdown_delay)
                    return
        self.admission.refuse()
        await self.admission.wait_idle()

    @staticmethod
    async def _wait_any(seconds: float, *events: Coroutine[Any, Any, object]) -> None:
        tasks = [asyncio.create_task(event) for event in events]
        _, unfinished = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in unfinished:
            task.cancel()


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which wakes once a second: a sign that its event loop runs."""

    def __init__(self, config: uvicorn.Config, heartbeats: Heartbeats) -> None:
        super().__init__(config)
        self._heartbeats = heartbeats
        self._has_to_stop = asyncio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)

    async def main_loop(self) -> None:
        while not self._has_to_stop.is_set():
            await self.on_tick(0)  # renews the Date header
            self._heartbeats.beat()
            try:
                await asyncio.wait_for(self._has_to_stop.wait(), BEAT_SECONDS)
            except TimeoutError:
                continue

    def stop(self) -> None:
        self.should_exit = True
        self._has_to_stop.set()


def _allow_browsers(app: FastAPI, config: ServerConfig) -> None:
    """Pages of other origins may use the API, as far as they are told to; a preflight brings no key."""
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=[REQUEST_ID_HEADER],
        )


def _uvicorn_config(app: Any, connections: Connections, limits: ApiLimits) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast(Any, partial(BoundedHttpProtocol, connections=connections, limits=limits)),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=1,
    )


def _serving(
    config: RuntimeConfig,
    engine: AsyncEngine,
    admission: Admission,
    tokenizer: Tokenizer,
    response_store: ResponseStore,
    background: BackgroundTasks,
    max_body_seconds: float,
) -> Serving:
    folder = Path(config.model.model)
    template_file = None if config.model.chat_template is None else Path(config.model.chat_template)
    tokenizer_folder = Path(config.model.tokenizer or config.model.model)
    template = load_chat_template(tokenizer_folder, tokenizer, template_file)
    source = None if template is None else template.source
    pooling = describe_pooling(config.model)
    return Serving(
        engine=engine,
        admission=admission,
        tokenizer=tokenizer,
        prompts=PromptBuilder(tokenizer, template),
        grammars=Grammars(),
        formats=answer_formats(tokenizer, source, config.model.tool_call_parser, config.model.reasoning_parser),
        description=TokenizerDescription(tokenizer, source),
        defaults=load_sampling_defaults(folder, tokenizer.eos_token_id, config.model.seed),
        model_names=config.model.served_model_name or (folder.resolve().name,),
        model_folder=str(folder),
        model_digest=model_digest(folder, tokenizer_folder),
        created=int(time.time()),
        max_n=config.server.max_n,
        max_sequences=min(config.server.max_request_sequences, config.server.max_sequences_in_flight),
        max_logprobs=config.server.max_logprobs,
        max_body_bytes=config.server.max_body_bytes,
        max_body_seconds=max_body_seconds,
        response_store=response_store,
        background=background,
        drops_client_header=config.server.drop_client_header,
        pooling=pooling,
        pair_prompt=None if pooling is None else pair_prompt_of(pooling, None if template_file is None else template),
        kv_transfer=config.cache.kv_transfer_config,
    )


def _registry(
    config: RuntimeConfig,
    model_name: str,
    rows: SharedRows,
    engine: AsyncEngine,
    admission: Admission,
    collectives: CollectiveTotals,
) -> CollectorRegistry:
    def view() -> EngineView:
        return EngineView(
            ready=engine.ready,
            stats=engine.stats,
            stats_by_core=engine.stats_by_core,
            num_requests_in_flight=admission.num_in_flight,
        )

    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(model_name, rows, view, collectives, _cache_labels(config.cache)))
    # Whichever of several API processes is scraped, it is the same process that is shown.
    ProcessCollector(pid=os.getpid if config.server.api_server_count == 1 else os.getppid, registry=registry)
    return registry


def _cache_labels(cache: CacheConfig) -> dict[str, str]:
    """As vLLM names and writes them."""
    return {
        "cache_dtype": cache.kv_cache_dtype,
        "gpu_memory_utilization": str(cache.gpu_memory_utilization),
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "prefix_caching_hash_algo": "sha256",
        "num_cpu_blocks": "0",
        "kv_offloading_backend": "None",
        "kv_offloading_size": "0",
    }
