"""One module an API: what its requests ask for, what their prompt is, how its errors look and its streams end."""
