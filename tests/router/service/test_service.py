"""Placement, ledger and index together: what was sent where, and what that says of the next request."""

from dataclasses import replace
from math import inf

import pytest
from tests.router.parts import a_request

from kvasir_router.admission.tenant_limits import TenantLimits
from kvasir_router.config import RouterConfig
from kvasir_router.debug.decisions import DecisionLog
from kvasir_router.dialects.dialect import Prompt
from kvasir_router.dialects.text_prompts import Tokenize
from kvasir_router.endpoints.address import Address, Role
from kvasir_router.placement.placement import LocalPrefill, Placement, leg_on
from kvasir_router.prefix_index.approximate import BYTES_PER_BLOCK
from kvasir_router.prefix_index.index import PrefixKey
from kvasir_router.request import InferenceRequest
from kvasir_router.service.factory import ServiceFactory, ServiceSettings
from kvasir_router.service.ledger import Ticket
from kvasir_router.service.load import SCRAPE_LIFETIME_SECONDS
from kvasir_router.service.registry import EndpointState
from kvasir_router.service.service import Service
from kvasir_router.tuning import Tuning

pytestmark = pytest.mark.anyio
A, B = Address("http://a"), Address("http://b")
SETTINGS = ServiceSettings(
    name="llama", model="m", aliases=(), adapters=(), created=0, policy="finishTime",
    remote_prefill_min_tokens=None, max_queue_size=10, max_queue_wait_seconds=1.0, router_secret=None,
)  # fmt: skip
CONFIG = RouterConfig(endpoint=(A.url,), prefix_block_size=10, bytes_per_token=1.0)


class StandingClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> StandingClock:
    return StandingClock()


@pytest.fixture
def factory(clock: StandingClock) -> ServiceFactory:
    """Its services may guess twenty blocks to be cached, all together: guesses get an eighth of the memory."""
    limits, tuning = (
        TenantLimits(None, None, lambda: None),
        Tuning(clock=clock, memory_limit_bytes=320 * BYTES_PER_BLOCK),
    )
    return ServiceFactory(CONFIG, None, limits, DecisionLog(), None, tuning)  # type: ignore[arg-type]


@pytest.fixture
def service(factory: ServiceFactory) -> Service:
    """Of A and B, both ready; nobody probes them."""
    made = factory.create(SETTINGS)
    made.registry.set_addresses({A, B}, EndpointState.READY)
    return made


async def test_what_services_guess_to_be_cached_is_bounded_for_all_together(factory: ServiceFactory) -> None:
    one, other = [factory.create(replace(SETTINGS, name=name)) for name in ("llama", "qwen")]
    long = bytes(range(200))
    one.index.insert(A.url, await key_of(one, long), 0.0, None)
    other.index.insert(B.url, await key_of(other, long), 0.0, None)
    assert (one.index.num_blocks(A.url), other.index.num_blocks(B.url)) == (20, 10)


async def key_of(service: Service, content: bytes = bytes(range(100))) -> PrefixKey:
    return await service.index.key(Prompt(content, is_token_ids=False, seed=b""))


async def asked(service: Service) -> InferenceRequest:
    return a_request(prefix=await key_of(service))


def sent(service: Service, request: InferenceRequest, url: str = A.url) -> Ticket:
    placement = service.place(request, avoid={A.url, B.url} - {url})
    assert placement is not None
    assert placement.leg.endpoint.url == url
    return service.dispatch(request, placement)[0]


def cached(service: Service, request: InferenceRequest) -> dict[str, int]:
    assert request.prefix is not None
    return dict(service.index.match(request.prefix, 0.0))


async def test_a_prompt_is_expected_to_be_cached_right_after_dispatch(service: Service) -> None:
    request = await asked(service)
    sent(service, request)
    assert cached(service, request) == {A.url: 100}


async def test_the_next_of_its_kind_is_placed_where_it_is_cached(service: Service) -> None:
    request = await asked(service)
    sent(service, request, B.url).finish()
    placement = service.place(request)
    assert placement is not None
    assert (placement.leg.endpoint.url, placement.leg.cached_tokens, placement.leg.uncached_tokens) == (B.url, 100, 0)


async def test_no_more_is_expected_to_be_cached_than_the_engines_kv_cache_holds(service: Service) -> None:
    request = await asked(service)
    endpoint = service.registry.get(A.url)
    assert endpoint is not None
    endpoint.load.scraped(kv_usage=0.0, kv_capacity_tokens=59, num_waiting=None, now=0.0)
    sent(service, request)
    assert cached(service, request) == {A.url: 50}


async def test_a_dispatch_that_failed_is_not_expected_to_be_cached(service: Service) -> None:
    request = await asked(service)
    placement = service.place(request)
    assert placement is not None
    service.dispatch(request, placement)[0].finish()
    service.withdraw(request, placement.leg.endpoint.url)
    assert cached(service, request) == {}


async def test_a_request_without_a_prompt_is_placed_and_changes_no_cache(service: Service) -> None:
    request = InferenceRequest(Tokenize(), "m", is_stream=False, prefix=None)
    placement = service.place(request)
    assert placement is not None
    ticket = service.dispatch(request, placement)[0]
    endpoint = placement.leg.endpoint
    assert (endpoint.load.num_in_flight, endpoint.load.resident_tokens) == (1, 0)
    service.withdraw(request, placement.leg.endpoint.url)
    ticket.finish()
    assert [one["prefix_blocks"] for one in service.describe()] == [0, 0]


async def test_a_pod_that_takes_over_an_address_inherits_no_cache(service: Service) -> None:
    request = await asked(service)
    sent(service, request)
    service.follow({Address(A.url, uid="new"), B}, EndpointState.READY)
    await service.prober.close()
    assert cached(service, request) == {}


async def test_a_request_on_a_gone_endpoint_still_ends(service: Service) -> None:
    request = await asked(service)
    ticket = sent(service, request)
    service.registry.set_addresses({B}, EndpointState.READY)
    ticket.finish()
    assert service.registry.urls() == {B.url}


async def test_what_is_too_old_is_forgotten(service: Service, clock: StandingClock) -> None:
    request = await asked(service)
    sent(service, request)
    clock.now = inf
    service.expire()
    assert [one["prefix_blocks"] for one in service.describe()] == [0, 0]


async def test_what_an_engine_said_of_its_load_too_long_ago_is_forgotten_at_the_next_refresh(
    service: Service, clock: StandingClock
) -> None:
    endpoint = service.registry.get(A.url)
    assert endpoint is not None
    endpoint.load.scraped(kv_usage=0.5, kv_capacity_tokens=100, num_waiting=None, now=100.0)
    clock.now = 100.0 + SCRAPE_LIFETIME_SECONDS
    service.refresh()
    assert endpoint.load.kv_usage == 0.5
    clock.now = 100.1 + SCRAPE_LIFETIME_SECONDS
    service.refresh()
    assert endpoint.load.kv_usage is None


async def test_prompts_are_paired_once_an_engine_has_a_part_only(service: Service) -> None:
    assert not service.is_paired
    service.registry.set_addresses({replace(A, role=Role.DECODE), replace(B, role=Role.PREFILL)}, EndpointState.READY)
    assert service.is_paired
    assert service.pairing is not None
    service.pairing.remote_min_tokens = 0
    request = a_request(prefix=await key_of(service), can_transfer_kv=True)
    placement = service.place(request)
    assert placement is not None
    assert [leg.endpoint.url for leg in placement.legs] == [A.url, B.url]
    service.dispatch(request, placement)
    assert cached(service, request) == {A.url: 100, B.url: 100}
    service.withdraw(request, B.url)
    assert cached(service, request) == {A.url: 100}


async def test_a_prefill_engine_where_it_has_failed_is_no_partner(service: Service) -> None:
    service.registry.set_addresses({replace(A, role=Role.DECODE), replace(B, role=Role.PREFILL)}, EndpointState.READY)
    assert service.pairing is not None
    service.pairing.remote_min_tokens = 0
    placement = service.place(a_request(prefix=await key_of(service), can_transfer_kv=True), avoid={B.url})
    assert placement is not None
    assert (placement.prefill, placement.local_prefill) == (None, LocalPrefill.NO_PREFILL_ENDPOINT)


OLD, SAME, NEW = (Address(f"http://{name}", revision=name[0]) for name in ("1old", "1same", "2new"))


@pytest.mark.parametrize(
    ("why", "num_in_flight", "avoid", "url", "received"),
    [
        ("those of its revision get its KV, what was generated included", 1, {OLD.url}, SAME.url, 130),
        ("its revision has no room", 2, {OLD.url}, NEW.url, 0),
        ("the others of its revision refuse it", 1, {OLD.url, SAME.url}, NEW.url, 0),
    ],
)
async def test_a_moved_stream_goes_where_its_kv_can_go(
    service: Service, why: str, num_in_flight: int, avoid: set[str], url: str, received: int
) -> None:
    """The new revision is idle, so that it would cost least."""
    service.registry.set_addresses({OLD, SAME, NEW}, EndpointState.READY)
    request = await asked(service)
    same = service.registry.get(SAME.url)
    assert same is not None
    for _ in range(num_in_flight):
        service.dispatch(request, Placement(leg_on(same, request, {})))
    service.withdraw(request, SAME.url)
    same.load.max_in_flight = 2
    placement = service.place(request, avoid, moved_from="1", num_generated_tokens=30)
    assert placement is not None
    leg = placement.leg
    assert (leg.endpoint.url, leg.received_tokens, leg.uncached_tokens) == (url, received, max(100 - received, 0)), why


async def test_a_moved_stream_is_never_prefilled_by_another_engine(service: Service) -> None:
    """Its journal says where its KV is, whatever else its engine is told."""
    service.registry.set_addresses(
        {replace(A, role=Role.DECODE, revision="2"), replace(B, role=Role.PREFILL, revision="2")}, EndpointState.READY
    )
    assert service.pairing is not None
    service.pairing.remote_min_tokens = 0
    placement = service.place(a_request(prefix=await key_of(service), can_transfer_kv=True), moved_from="1")
    assert placement is not None
    assert (placement.prefill, placement.leg.uncached_tokens) == (None, 100)
