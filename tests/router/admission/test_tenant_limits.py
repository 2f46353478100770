import pytest

from kvasir_router.admission.tenant_limits import TenantLimits
from kvasir_router.errors import TenantRateLimitError


def limits(*, tokens_per_minute: int | None = None, max_in_flight: int | None = None) -> TenantLimits:
    return TenantLimits(tokens_per_minute, max_in_flight, lambda: None)


def test_without_limits_everything_may_start() -> None:
    free = limits()
    free.charge("a", 10**9, 0.0)
    with free.in_flight("a"):
        assert free.may_start("a")


def test_a_tenant_over_its_rate_is_told_exactly_when_to_come_back() -> None:
    limited = limits(tokens_per_minute=600)
    limited.charge("a", 500, 0.0)
    with pytest.raises(TenantRateLimitError, match="the tenant a may send 600 prompt tokens a minute") as refused:
        limited.charge("a", 175, 0.0)
    assert (refused.value.status, refused.value.retry_after_seconds) == (429, 8)
    limited.charge("a", 175, 8.0)


def test_one_tenants_rate_is_not_anothers() -> None:
    limited = limits(tokens_per_minute=600)
    limited.charge("a", 600, 0.0)
    limited.charge("b", 600, 0.0)


def test_a_request_that_never_started_is_given_back() -> None:
    limited = limits(tokens_per_minute=600)
    limited.charge("a", 600, 0.0)
    limited.refund("a", 600)
    limited.charge("a", 600, 0.0)


def test_a_refund_without_a_charge_makes_nothing() -> None:
    limits().refund("a", 600)


def test_a_tenant_may_have_as_many_in_flight_as_its_limit() -> None:
    limited = limits(max_in_flight=2)
    with limited.in_flight("a"):
        assert limited.may_start("a")
        with limited.in_flight("a"):
            assert not limited.may_start("a")
            assert limited.may_start("b")
        assert limited.may_start("a")
    assert limited.num_in_flight("a") == 0


def test_room_is_announced_when_a_tenant_leaves_its_limit_and_only_then() -> None:
    announced: list[bool] = []
    limited = TenantLimits(None, 1, lambda: announced.append(limited.may_start("a")))
    with limited.in_flight("a"):
        with limited.in_flight("a"):  # a stream that goes on elsewhere
            assert announced == []
        assert announced == []
    assert announced == [True]
    roomy = TenantLimits(None, 2, lambda: announced.clear())
    with roomy.in_flight("a"):
        pass
    assert announced == [True]
