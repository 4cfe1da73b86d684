"""Who takes part: membership epochs and the protocol that makes them, without any I/O."""
