"""Ways in which blocks differ, as numbers that compiled functions ask for."""

NORM_NONE, NORM_HEADS, NORM_WHOLE = 0, 1, 2
"""Of queries and keys: none, head by head, or over the whole projection."""
SCORES_SOFTMAX, SCORES_SIGMOID = 0, 1
"""Of a router's logits."""
GATED_SILU, GATED_CLAMPED, GATED_GELU = 0, 1, 2
"""Between the projections of a routed expert: silu(gate) * up, or (up + 1) * gate * sigmoid(gate)
with limits, or gelu(gate) * up, gelu by a hyperbolic tangent."""
