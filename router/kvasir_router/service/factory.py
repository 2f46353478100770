"""Builds a service's parts: what is its own from its settings, what all share from the router's configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import aiohttp

from kvasir_router.admission.admission import Admission, QueueLimits
from kvasir_router.admission.tenant_limits import TenantLimits
from kvasir_router.config import PolicyName, ProbeLimits, RouterConfig
from kvasir_router.debug.decisions import DecisionLog
from kvasir_router.memory import prefix_memory, text_cache_bytes
from kvasir_router.picker import Picker
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.placement.pairing import Pairing
from kvasir_router.placement.placement import Policy
from kvasir_router.placement.policies import RoundRobin, SessionAffinity
from kvasir_router.placement.prefix_fetching import PrefixFetching
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex
from kvasir_router.prefix_index.index import PrefixIndex
from kvasir_router.service.health import ProbePace, Prober
from kvasir_router.service.in_flight_limits import InFlightLimits
from kvasir_router.service.late_binding import LateBinding
from kvasir_router.service.ledger import Ledger
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.migration import Migration
from kvasir_router.service.peers import Peers
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import ModelCatalog, Registry
from kvasir_router.service.service import Service
from kvasir_router.tuning import TUNING, Tuning

if TYPE_CHECKING:
    from kvasir_router.service.following import FollowingFactory
    from kvasir_router.service.peer_feed import PeerFeed

# Behind a gateway: so long after its last prompt a service has no tokenizer in memory.
_TOKENIZER_IDLE_SECONDS = 600.0
_POLICIES: dict[PolicyName, type[Policy]] = {
    "finishTime": FinishTime,
    "roundRobin": RoundRobin,
    "sessionAffinity": SessionAffinity,
}


@dataclass(frozen=True)
class ServiceSettings:
    """What distinguishes a service from others behind the same router."""

    name: str
    model: str | None  # None: its endpoints tell
    aliases: tuple[str, ...]
    adapters: tuple[str, ...]  # listed even where no endpoint has them
    created: int  # seconds since 1970
    policy: PolicyName
    remote_prefill_min_tokens: int | None  # None: the cost decides
    max_queue_size: int
    max_queue_wait_seconds: float
    router_secret: str | None  # what its engines know the router by; None: nothing is set


class ServiceFactory:
    """`session` is for probes; its owner closes it after the services and the factory. `tenant_limits` are for all of
    them together. `peer_feed` None: there are no peers to tell.
    """

    def __init__(
        self,
        config: RouterConfig,
        session: aiohttp.ClientSession,
        tenant_limits: TenantLimits,
        decisions: DecisionLog,
        peer_feed: "PeerFeed | None",
        tuning: Tuning = TUNING,
        take_heard: Callable[[str], bool] = lambda url: False,
    ) -> None:
        self._tuning = tuning
        self._config = config
        self._session = session
        self._take_heard = take_heard
        self._probe_pace = ProbePace()
        self._tenant_limits = tenant_limits
        self._decisions = decisions
        self._peer_feed = peer_feed
        self._prefix_memory = prefix_memory(tuning.memory_limit_bytes)
        self._followings = _followings(config, session, tuning)

    def create(self, settings: ServiceSettings) -> Service:
        config, clock = self._config, self._tuning.clock
        prefill = FleetPrefill()

        def changed() -> None:
            limits.refresh()
            admission.wake()

        registry = Registry(
            lambda: EndpointLoad(config.max_in_flight, prefill.new_member()),
            changed,
            own_models=_own_models(settings),
        )
        pairing = Pairing(settings.remote_prefill_min_tokens) if config.kv_transfer_port else None
        peers, num_before = None, None
        if self._peer_feed is not None:
            peers = Peers(registry, clock, lambda: admission.next_waiting(), lambda: admission.wake())
            num_before = peers.num_before
            self._peer_feed.attach(settings.name, peers)
        binding = LateBinding(registry, config.max_prefill_queue, clock, pairing, num_before)
        admission = Admission(binding.seconds_to_room, _queue_limits(settings), self._tenant_limits)
        limits = InFlightLimits(registry, config.max_in_flight, clock, admission.wake)
        ledger = Ledger(admission.wake, peers)
        following = None
        approximate = ApproximatePrefixIndex(
            config.prefix_index_size,
            config.prefix_ttl,
            config.prefix_block_size,
            config.bytes_per_token,
            self._prefix_memory,
        )
        index: PrefixIndex = approximate
        if self._followings is not None:
            following = self._followings.create(approximate, registry, settings.router_secret, admission.wake)
            index = following.index
        fetching = PrefixFetching() if config.kv_transfer_port and following is not None else None
        migration = Migration(registry, ledger, self._session, settings.router_secret)
        prober = Prober(
            registry,
            ledger,
            index,
            self._session,
            config.probe_interval,
            self._probe_pace,
            migration if config.kv_transfer_port else None,
            self._tuning.probes,
            ProbeLimits(config.probe_timeout, config.probe_failures, config.hung_after),
            self._take_heard,
        )
        return Service(
            name=settings.name,
            registry=registry,
            ledger=ledger,
            prefill=prefill,
            in_flight_limits=limits,
            prober=prober,
            following=following,
            index=index,
            admission=admission,
            catalog=_catalog(settings, registry),
            policy=settings.policy,
            picker=self._picker(settings, pairing, fetching),
            pairing=pairing,
            fetching=fetching,
            router_secret=settings.router_secret,
            clock=clock,
        )

    def configure(self, service: Service, settings: ServiceSettings) -> None:
        """New settings of a service that runs: what it knows of its endpoints stays, and what is in flight there."""
        service.catalog = _catalog(settings, service.registry)
        service.policy = settings.policy
        service.picker = self._picker(settings, service.pairing, service.fetching)
        if service.pairing is not None:
            service.pairing.remote_min_tokens = settings.remote_prefill_min_tokens
        service.registry.set_own_models(_own_models(settings))
        service.admission.configure(_queue_limits(settings))

    def close(self) -> None:
        """After the services."""
        if self._followings is not None:
            self._followings.close()

    def _picker(self, settings: ServiceSettings, pairing: Pairing | None, fetching: PrefixFetching | None) -> Picker:
        return Picker(_POLICIES[settings.policy](), partial(self._decisions.add, settings.name), pairing, fetching)


def _followings(config: RouterConfig, session: aiohttp.ClientSession, tuning: Tuning) -> "FollowingFactory | None":
    if config.kv_events is None:
        return None
    from kvasir_router.service.following import FollowingFactory  # 160 ms and 9 MB, see there
    from kvasir_router.service.tokenizer_source import Tokenizers

    idle_seconds = _TOKENIZER_IDLE_SECONDS if config.gateway else None
    tokenizers = Tokenizers(text_cache_bytes(tuning.memory_limit_bytes))
    return FollowingFactory(config.kv_events, config.kv_index_size, session, tuning.clock, idle_seconds, tokenizers)


def _queue_limits(settings: ServiceSettings) -> QueueLimits:
    return QueueLimits(settings.max_queue_size, settings.max_queue_wait_seconds)


def _catalog(settings: ServiceSettings, registry: Registry) -> ModelCatalog:
    return ModelCatalog(
        settings.model,
        settings.aliases,
        settings.adapters,
        registry.listed_models,
        settings.created,
        registry.max_model_len,
    )


def _own_models(settings: ServiceSettings) -> frozenset[str]:
    return frozenset() if settings.model is None else frozenset({settings.model})
