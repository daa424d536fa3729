"""A fleet on a simulated clock: real scheduler, cache and routing, modelled devices."""
