"""Mutants: one-line faults in a copy of kmqpy, each of which a test must catch (`make mutants`)."""
