"""From desired and observed objects to writes."""
