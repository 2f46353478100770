"""Both sides of the bytes: connections towards engines, answers towards clients, and what is between them."""
