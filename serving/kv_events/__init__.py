"""What the caches of a worker hold, told to routers as it changes: vLLM's events over ZMQ."""
