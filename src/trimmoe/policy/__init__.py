"""Algorithm 2's choice of an action, one implementation for every preset and baseline."""
