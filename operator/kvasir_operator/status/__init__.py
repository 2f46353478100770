"""What a service's status and Events say."""
