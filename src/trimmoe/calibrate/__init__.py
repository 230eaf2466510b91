"""Algorithm 1, lines 1-8: a model and a text give a Profile."""
