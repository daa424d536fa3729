"""The OpenAI-compatible HTTP server of the engine."""
