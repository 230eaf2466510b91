"""Checkpoints whose weights are quantised as they are published, read expert by expert.

Each format says which tensors of the model the stored ones stand for, and decodes them one matrix
at a time, so that the rest of the loader never sees how they are stored.
"""
