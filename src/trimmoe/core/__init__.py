"""Specifications, artifacts and errors that every other package builds on; no torch, no I/O
except the files of artifacts."""
