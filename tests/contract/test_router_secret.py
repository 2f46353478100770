"""The operator hands a secret to router and engines by environment; the router shows it to engines in a header, and
engines derive the keys from it by which they let one another in."""

from kvasir_operator.api import labels
from kvasir_operator.resources.router_secret import with_random_value
from kvasir_router.config import ROUTER_SECRET_VARIABLE, router_secret_of
from kvasir_runtime.service_secret import SECRET_VARIABLE, service_secret


def test_the_router_reads_the_variable_that_the_operator_sets() -> None:
    assert labels.ROUTER_SECRET_ENV == ROUTER_SECRET_VARIABLE
    assert router_secret_of({labels.ROUTER_SECRET_ENV: "s3"}) == "s3"


def test_what_the_operator_draws_fits_into_a_header() -> None:
    secret = with_random_value({"kind": "Secret"})
    [value] = secret["stringData"].values()
    assert router_secret_of({ROUTER_SECRET_VARIABLE: value}) == value


def test_engines_and_ranks_read_the_same_variable() -> None:
    assert labels.ROUTER_SECRET_ENV == SECRET_VARIABLE
    assert service_secret({labels.ROUTER_SECRET_ENV: "s3"}) == "s3"
