"""kmqpy in frameworks, by the interfaces that they have for it."""
