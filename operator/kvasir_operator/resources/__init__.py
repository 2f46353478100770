"""One builder a child object: pure functions from a service and the settings to a manifest dict."""
