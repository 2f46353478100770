"""docs/reference/metrics.md lists the series that the programs export."""

from docs.metrics_page import PAGE, page


def test_the_page_is_that_of_the_registries() -> None:
    assert PAGE.read_text() == page(), "run docs/metrics_page.py"
