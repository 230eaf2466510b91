"""The wire between servers: typed messages and tensors over links that may stall, break and lie.

`base` holds the seam; `transport` its rules on any carrier; `zmq_transport`, `memory` and
`emulation` are carriers; `link`, `codec` and `estimates` are the parts without I/O.
"""
