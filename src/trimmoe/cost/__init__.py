"""One cost model and the look-ahead built on it; everything that decides uses these two."""
