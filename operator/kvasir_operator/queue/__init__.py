"""Which service is reconciled when: the work queue and its workers."""
