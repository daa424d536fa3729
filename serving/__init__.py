"""Compiled programs and the loops that serve requests with them."""
