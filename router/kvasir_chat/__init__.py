"""A conversation as one text, which router and engine both make of it, alike; knows neither."""
