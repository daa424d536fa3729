"""Checkpoints: the released safetensors format (ARCHITECTURE section 2), Orbax, what fits where."""
