"""The library's own first file names some thousand classes by asterisks, which take the type
checker half a minute to follow, and declares few of their types."""

from typing import Any

def __getattr__(name: str) -> Any: ...
