"""Tests of dsv41_jax."""
