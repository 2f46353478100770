"""What each endpoint's prefix cache is believed to hold."""
