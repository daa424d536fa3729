"""DeepSeek-V4.1-Flash in JAX: configuration, model, checkpoints."""
