import pytest

from kvasir_router.admission.queue import DeficitRoundRobin


def served(turns: DeficitRoundRobin, costs: dict[str, int], num_requests: int) -> list[str]:
    """The order in which tenants that always wait start requests of their cost."""
    order = []
    for _ in range(num_requests):
        tenant = turns.next(costs.__contains__)
        assert tenant is not None
        turns.charge(tenant, costs[tenant])
        order.append(tenant)
    return order


def joined(*tenants: str, quantum_tokens: int = 100) -> DeficitRoundRobin:
    turns = DeficitRoundRobin(quantum_tokens)
    for tenant in tenants:
        turns.join(tenant)
    return turns


def test_tenants_with_equal_requests_take_turns() -> None:
    order = served(joined("a", "b"), {"a": 100, "b": 100}, 6)
    assert sorted(order[:2]) == sorted(order[2:4]) == sorted(order[4:]) == ["a", "b"]


@pytest.mark.parametrize("large", [300, 5000, 100_000])
def test_shares_are_equal_in_tokens_not_in_requests(large: int) -> None:
    order = served(joined("small", "large"), {"small": 100, "large": large}, 4 * large // 100)
    tokens = {"small": 100 * order.count("small"), "large": large * order.count("large")}
    assert abs(tokens["small"] - tokens["large"]) <= large + 200


def test_who_comes_anew_goes_first() -> None:
    turns = joined("a", "b")
    served(turns, {"a": 10, "b": 10}, 3)
    turns.join("new")
    assert turns.next({"a", "b", "new"}.__contains__) == "new"


def test_a_turn_ends_when_its_credit_is_used_up_and_not_before() -> None:
    turns = joined("a", "b")
    turns.charge("b", 99)
    assert turns.next({"a", "b"}.__contains__) == "b"
    turns.charge("b", 1)
    assert turns.next({"a", "b"}.__contains__) == "a"


def test_of_those_without_credit_the_first_is_next_though_another_owes_nothing() -> None:
    turns = joined("a", "b")
    turns.charge("a", 150)
    turns.charge("b", 100)
    assert turns.next({"a", "b"}.__contains__) == "a"


def test_those_that_cannot_start_are_passed_over_and_save_up_no_more_than_a_turn() -> None:
    turns = joined("a", "stuck")
    for _ in range(50):
        turns.charge("a", 100)
    order = served(turns, {"a": 100, "stuck": 100}, 6)
    assert order.count("stuck") <= 4


def test_leaving_the_queue_between_two_requests_pays_no_debt() -> None:
    turns = joined("patient", "sly")
    for _ in range(3):
        turns.charge("sly", 1000)
        turns.leave("sly")
        order = served(turns, {"patient": 100}, 5)
        turns.join("sly")
        assert turns.next({"patient", "sly"}.__contains__) == "patient"
        order += served(turns, {"patient": 100}, 5)


def test_debts_are_forgotten_when_nobody_waits() -> None:
    turns = joined("a", "b")
    turns.charge("a", 10_000)
    turns.leave("a")
    turns.leave("b")
    turns.join("b")
    turns.join("a")
    assert turns.next({"a", "b"}.__contains__) == "a"


def test_a_debtor_that_is_gone_is_forgotten_once_its_debt_is_repaid() -> None:
    turns = joined("a", "gone")
    turns.charge("gone", 300)
    turns.leave("gone")
    served(turns, {"a": 50}, 7)  # its fourth turn, of which half is left
    for tenant in ("new", "gone"):
        turns.join(tenant)
    assert turns.next({"a", "new", "gone"}.__contains__) == "gone"


def test_nobodys_turn_is_none() -> None:
    assert joined("a").next(lambda _: False) is None
    assert DeficitRoundRobin().next(lambda _: True) is None
