"""A DFlash drafter trainer: one process per host, one thread per device."""
