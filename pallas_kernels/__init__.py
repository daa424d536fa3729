"""Operations of the model: contract, jnp reference and, where it pays, a Pallas GPU kernel."""
