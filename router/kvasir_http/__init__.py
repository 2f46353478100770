"""HTTP/1.1 towards clients, as router and engine both serve it; knows neither."""
