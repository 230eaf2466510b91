"""What Python calls of the compiled blocks, a function at a time or a whole segment."""

from __future__ import annotations

from trimmoe.models.compiled import attending, attention, draft_step, product, routing, step
from trimmoe.models.compiled.apart import prepare
from trimmoe.models.compiled.attention import Shape, jit, wide
from trimmoe.models.compiled.routing import asked
from trimmoe.models.compiled.step import home_segment, read, segment

__all__ = ["Shape", "asked", "home_segment", "read", "segment", "wide"]


def prepare_all() -> None:
    """Have compiled what whole blocks need."""
    prepare(product, attention, attending, routing, step)


def prepare_draft() -> None:
    """Have compiled what draft heads need."""
    prepare(product, attention, draft_step)


def prepare_routed() -> None:
    """Have compiled what routed experts alone need."""
    prepare(product, step)


@jit
def multiply(matrix, x, rows, out, threads):
    """See `product.product`."""
    product.product(matrix, x, rows, out, threads, 0)


@jit
def norm(x, weight, size, epsilon, out):
    """See `attention.norm`."""
    attention.norm(x, weight, size, epsilon, out)


@jit
def attend(shape, block, hidden, rotary, places, slab, aside):
    """See `attending.attend`."""
    attending.attend(shape, block, hidden, rotary, places, slab, aside)


@jit
def leave(shape, block, hidden, rotary, places, slab):
    """See `attending.leave`."""
    attending.leave(shape, block, hidden, rotary, places, slab)


@jit
def route(shape, block, normed, logits, probabilities, experts, gates):
    """See `routing.route`."""
    routing.route(shape, block, normed, logits, probabilities, experts, gates)


@jit
def dense(shape, block, normed, out):
    """See `step.dense`."""
    step.dense(shape, block, normed, 0, out)


@jit
def dense_block(shape, block, hidden, rotary, places, slab, aside):
    """See `step.dense_block`."""
    step.dense_block(shape, block, hidden, rotary, places, slab, aside)


@jit
def routed(shape, weights, normed, experts, gates, out):
    """See `step.routed`."""
    step.routed(shape, weights, normed, experts, gates, 0, out)


@jit
def behind(shape, block, hidden, given, out):
    """See `step.behind`."""
    step.behind(shape, block, hidden, given, out)


@jit
def gathered(shape, block, weights, hidden, normed, experts, gates, out):
    """See `step.gathered`."""
    step.gathered(shape, block, weights, hidden, normed, experts, gates, 0, out)


@jit
def finish(shape, block, weights, hidden, normed, experts, gates):
    """See `step.finish`."""
    step.finish(shape, block, weights, hidden, normed, experts, gates, 0)


@jit
def remember(shape, matrices, norms, states, tokens, positions, places, rotary):
    """See `draft_step.remember`."""
    draft_step.remember(shape, matrices, norms, states, tokens, positions, places, rotary)


@jit
def draft(
    shape, inner, matrices, norms, states, tokens, ahead, positions, places, rotary, made, named
):
    """See `draft_step.draft`."""
    draft_step.draft(
        shape, inner, matrices, norms, states, tokens, ahead, positions, places, rotary, made, named
    )


@jit
def best(matrix, named, count, tokens, chances):
    """See `draft_step.best`."""
    draft_step.best(matrix, named, count, tokens, chances)
