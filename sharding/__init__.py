"""Layouts of the model over several devices."""
