"""What is there: informers, the cache they fill, what keeps pods waiting, and how busy engines are."""
