"""Training of a small model of this architecture: data, losses, optimiser, export."""
