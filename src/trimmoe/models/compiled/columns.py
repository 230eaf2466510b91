"""What is where in the records that blocks and experts are."""

from __future__ import annotations

from trimmoe.models.compiled.product import RECORD

# Columns of a block.
ATTENTION_NORM, EXPERTS_NORM, QUERY_NORM, KEY_NORM = 0, 1, 2, 3
QUERY_BIAS, KEY_BIAS, VALUE_BIAS, OUTPUT_BIAS = 4, 5, 6, 7
WINDOW, LAYER, SINKS, LATENTS, ROUTER_BIAS, CORRECTION = 8, 9, 10, 11, 12, 13
"""`LATENTS`: the address of what is known of compressed keys (`latent_step`). `CORRECTION`: of a
vector [E] that is added to scores where experts are chosen, and nowhere else."""
_MATRICES = 14
QUERY_DOWN, QUERY, KEY_VALUE, OUTPUT, ROUTER, SHARED_UP, SHARED_DOWN, SHARED_MIX = (
    _MATRICES + RECORD * i for i in range(8)
)
"""`KEY_VALUE`: keys, then values, or both compressed and then what is turned of keys; `SHARED_UP`:
gate projections, then up projections; each padded to whole panels. `QUERY_DOWN`: what compresses
queries, if anything does."""
COLUMNS = _MATRICES + RECORD * 8
# Columns of an expert.
UP, DOWN = 0, RECORD
UP_BIAS, DOWN_BIAS = 2 * RECORD, 2 * RECORD + 1
"""Addresses, 0 for none; of the gate projection, then of the up projection."""
EXPERT = 2 * RECORD + 2
