"""The rules of other routers in our own words, from their descriptions; their defaults unless said."""
