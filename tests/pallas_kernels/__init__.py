"""Tests of pallas_kernels."""
