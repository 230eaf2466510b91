"""What a user runs to see something: comparisons, tables and pictures."""
