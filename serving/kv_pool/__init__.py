"""A pool of cached pages beyond one engine: shared memory of the host, or Mooncake Store."""
