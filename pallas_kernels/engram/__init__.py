"""Engram: n-gram hashes, table rows and the gate (ARCHITECTURE section 9)."""
