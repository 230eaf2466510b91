"""Algorithm 2 as a machine without I/O: `step(state, event) -> (state, commands)`.

Every driver, in one process, over a network or on a virtual clock, feeds the same events and obeys
the same commands.
"""
