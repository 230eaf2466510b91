"""What `import trimmoe` offers: models, plans, answers and simulations in a few lines of Python.

It stands on the very functions that the commands stand on; `trimmoe/__init__.py` names its parts.
"""
