"""Names of all series of operator, router and engine, as queries spell them."""

from docs.metrics_page import programs


def exported_names() -> set[str]:
    return {name for series in programs().values() for each in series for name in each.sample_names}
