"""What is where in the records that blocks and experts are."""

from __future__ import annotations

from trimmoe.models.compiled.product import RECORD

# Columns of a block.
ATTENTION_NORM, EXPERTS_NORM, QUERY_NORM, KEY_NORM = 0, 1, 2, 3
QUERY_BIAS, KEY_BIAS, VALUE_BIAS, OUTPUT_BIAS = 4, 5, 6, 7
WINDOW, LAYER, SINKS, LATENTS, ROUTER_BIAS, CORRECTION = 8, 9, 10, 11, 12, 13
DELTA, SCALES = 14, 15
"""`LATENTS`: the address of what is known of compressed keys (`latent_step`); `DELTA`: of what is
known of linear attention (`delta_step`). `CORRECTION`: of a vector [E] that is added to scores
where experts are chosen, and nowhere else; `SCALES`: of one that gates are multiplied with."""
HEAD, KV_HEADS, TURNED, TURNED_AT = 16, 17, 18, 19
"""Sizes of attention, which need not be those of other blocks; and where in the tables of rotary
embedding its angles begin."""
VALUE_NORM, ATTENTION_POST, ROUTER_NORM, SHARED_NORM = 20, 21, 22, 23
SHARED_POST, ROUTED_POST, BOTH_POST, OUTPUT_SCALE = 24, 25, 26, 27
"""Norms of values and of what attention gives; of what a router and a shared expert read that read
something else than the routed ones; of what the shared one gives, the routed ones, and both, after
which the block's output is multiplied with the number at `OUTPUT_SCALE`. 0 where there is none."""
_MATRICES = 28
QUERY_DOWN, QUERY, KEY_VALUE, OUTPUT, ROUTER, SHARED_UP, SHARED_DOWN, SHARED_MIX, GATE = (
    _MATRICES + RECORD * i for i in range(9)
)
"""`KEY_VALUE`: keys, then values, or keys that are the values too, or both compressed and then what
is turned of keys; `SHARED_UP`: gate projections, then up projections; each padded to whole panels.
`QUERY_DOWN`: what compresses queries, if anything does; `GATE`: what heads give is gated with."""
COLUMNS = _MATRICES + RECORD * 9
# Columns of an expert.
UP, DOWN = 0, RECORD
UP_BIAS, DOWN_BIAS = 2 * RECORD, 2 * RECORD + 1
"""Addresses, 0 for none; of the gate projection, then of the up projection."""
EXPERT = 2 * RECORD + 2
