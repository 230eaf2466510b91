"""As the one above."""

__path__: list[str]
