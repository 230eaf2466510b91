"""`python -m trimmoe.cli`."""

from trimmoe.cli import main

main()
