"""Tests that need several devices; ``tests/sharding/test_on_devices.py`` runs them on simulated
ones.
"""
