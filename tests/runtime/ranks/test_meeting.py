"""Where node 0 listens, and what it says of an address that is not its own."""

import pytest

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.ranks.meeting import hosted_links


def test_an_address_of_another_node_is_refused_by_the_flags_name() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"--master-addr is 192\.0\.2\.1.*give an address of node 0"),
        hosted_links("192.0.2.1", 0, 1, None),
    ):
        pass
