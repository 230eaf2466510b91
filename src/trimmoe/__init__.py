"""TrimMoE: distributed Mixture-of-Experts inference that removes the hops a token does not need."""

__version__ = "0.1.0"
