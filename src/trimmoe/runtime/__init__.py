"""Drivers that really execute the model."""
