"""Quality by real execution: flips and perplexity against the exact model."""
