"""Compile checks for the H200; they need no GPU, but a CUDA build of JAX."""
