"""Conditions: what is carried over from the stored ones, and how reasons rank."""

from kvasir_operator.api.conditions import (
    DEGRADING_REASONS,
    Condition,
    ConditionType,
    Reason,
    carry_over,
    find_condition,
    severity,
)

BEFORE, AFTER = "2026-11-20T10:00:00Z", "2026-11-20T11:00:00Z"


def ready(is_true: bool, message: str = "") -> Condition:
    reason = Reason.SERVING if is_true else Reason.LOADING_MODEL
    return Condition(ConditionType.READY, is_true, reason, message)


def test_the_transition_time_changes_only_with_the_status() -> None:
    first = carry_over([], [ready(False)], 1, BEFORE)
    same = carry_over(first, [ready(False, "another message")], 2, AFTER)
    changed = carry_over(same, [ready(True)], 2, AFTER)
    assert [each[0]["lastTransitionTime"] for each in (first, same, changed)] == [BEFORE, BEFORE, AFTER]
    assert same[0]["message"] == "another message"
    assert same[0]["observedGeneration"] == 2


def test_stored_conditions_have_the_shape_of_the_api_conventions() -> None:
    assert carry_over([], [ready(True, "2 of 2")], 3, BEFORE) == [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Serving",
            "message": "2 of 2",
            "observedGeneration": 3,
            "lastTransitionTime": BEFORE,
        }
    ]


def test_a_condition_is_found_by_its_type() -> None:
    stored = carry_over([], [ready(True)], 1, BEFORE)
    assert find_condition(stored, ConditionType.READY) == stored[0]
    assert find_condition(stored, ConditionType.DEGRADED) is None


def test_an_invalid_spec_is_worse_than_a_failing_pull_is_worse_than_loading_is_worse_than_a_limitation() -> None:
    ranked = [Reason.INVALID_SPEC, Reason.IMAGE_PULL_FAILED, Reason.LOADING_MODEL, Reason.UNSUPPORTED_FEATURE]
    ranks = [severity(reason) for reason in ranked]
    assert ranks == sorted(set(ranks))


def test_every_reason_that_degrades_has_a_rank_and_none_that_a_pod_soon_gets_over_degrades() -> None:
    assert [reason for reason in DEGRADING_REASONS if severity(reason) < 0] == []
    assert not {Reason.PULLING_IMAGE, Reason.LOADING_MODEL, Reason.INSUFFICIENT_CAPACITY} & set(DEGRADING_REASONS)


def test_no_reason_is_ever_reworded() -> None:
    words = {reason.name: "".join(word.capitalize() for word in reason.name.split("_")) for reason in Reason}
    assert {reason.name: reason.value for reason in Reason} == words
