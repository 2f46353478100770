"""The account that engines of all roles share."""

from collections.abc import Callable

import pytest

from kvasir_operator.api.defaults import InstallationDefaults
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.resources.service_accounts import engine_service_account, engine_service_account_name

MakeService = Callable[..., InferenceService]
MINE = {"pod": {"serviceAccountName": "mine"}}


@pytest.mark.parametrize(
    ("prefill", "decode", "names", "is_made"),
    [
        ({}, {}, ["llama-engine", "llama-engine"], True),
        (MINE, {}, ["mine", "llama-engine"], True),
        (MINE, MINE, ["mine", "mine"], False),
    ],
)
def test_one_is_made_unless_every_role_names_another(
    make_service: MakeService, prefill: dict[str, object], decode: dict[str, object], names: list[str], is_made: bool
) -> None:
    service = make_service(disaggregation={"prefill": prefill, "decode": decode})
    roles = engine_roles(service, InstallationDefaults())
    account = engine_service_account(service, roles)

    assert [engine_service_account_name(service, role) for role in roles] == names
    assert (account is not None) is is_made


def test_it_belongs_to_no_single_role_and_mounts_no_token(make_service: MakeService) -> None:
    service = make_service()
    account = engine_service_account(service, engine_roles(service, InstallationDefaults()))

    assert account is not None
    assert account["metadata"]["labels"]["serving.kvasir.dev/service"] == "llama"
    assert "serving.kvasir.dev/role" not in account["metadata"]["labels"]
    assert not account["automountServiceAccountToken"]
