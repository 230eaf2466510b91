"""Whether what a peer says of tokens can be: of this vocabulary, within a context, plain numbers.

Whatever passes here may be put into arrays, added up and shown to users.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from trimmoe.runtime.node.records.messages import (
    Ask,
    Message,
    Prompt,
    Release,
    Reserve,
    Retain,
    SamplingSpec,
    Start,
    Withdraw,
    access_of,
)
from trimmoe.runtime.node.records.tokens import (
    After,
    ChargeSpec,
    LedgerSpec,
    ReceiptSpec,
    ScoreSpec,
    Token,
)

_MOST_SLOTS = 1 << 20
"""That a token's layers have together."""
_LEAST_BUDGET = 1e-9
_MOST_RATE = 1e6
_MOST_SUM = 1e6
"""Of seconds and of losses."""
MOST_WEIGHTS = 256
"""Loss weights that tokens of one server's users set out with; value tables are made for each."""


def all_below(values: Iterable[int], bound: int, least: int = 0) -> bool:
    """Whether all are at least `least` and less than `bound`."""
    return all(least <= each < bound for each in values)


def is_share(value: float) -> bool:
    """Of one; not for what is no number."""
    return 0.0 <= value <= 1.0


def is_rate(value: float) -> bool:
    """Of something that a server may do, by the second."""
    return 0.0 <= value <= _MOST_RATE


def is_count(value: int) -> bool:
    """Of something that a server may have."""
    return 0 <= value < 1 << 31


def comes_from(sender: int, message: Message) -> bool:
    """Whether a message that only the access server of a sequence sends is of that server: no
    other one may begin, end or change what its users are answered."""
    match message:
        case Release(sequences=sequences) | Retain(sequences=sequences):
            pass
        case Start(rows=rows):
            sequences = rows.sequences
        case Reserve() | Withdraw() | Prompt() | Ask():
            sequences = [message.sequence]
        case _:
            return True
    return all(each >= 0 and access_of(each) == sender for each in sequences)


def are_tokens(tokens: Sequence[Token], vocab_size: int, positions: int) -> bool:
    """Whether these may be the next ones of answers; a position may be just after the last."""
    return all(
        0 <= one.token < vocab_size
        and 0 <= one.position <= positions
        and 0 <= one.epoch <= positions
        and (one.logprob is None or one.logprob <= 0.0)
        and _are_alternatives(one.top, vocab_size)
        and (one.ledger is None or is_ledger(one.ledger))
        and (one.receipt is None or _is_receipt(one.receipt))
        and (one.charge is None or _is_charge(one.charge, positions))
        and _are_scores(one.scores, vocab_size, positions)
        and all_below(one.follows, vocab_size)
        for one in tokens
    )


def are_told_after(after: Sequence[After], vocab_size: int, positions: int) -> bool:
    """Whether this may have become of tokens after their answers."""
    later = [one.token for one in after if one.token is not None]
    return all(is_ledger(one.ledger) for one in after) and are_tokens(later, vocab_size, positions)


def is_ledger(ledger: LedgerSpec) -> bool:
    """Whether its numbers can be added to others; `unpack_ledger` looks at its shape."""
    counts = (ledger.slots_run, ledger.slots_dropped, ledger.audits)
    # Policies without a budget have an endless one.
    sums = (ledger.delay_s, ledger.loss)
    # Either may be below zero: what follows a token may take back what was told with it.
    return all(abs(each) < _MOST_SLOTS for each in counts) and (
        all(map(_is_sum, sums)) and not math.isnan(ledger.budget)
    )


def _is_sum(value: float) -> bool:
    return abs(value) < _MOST_SUM


def can_draw(spec: SamplingSpec, vocab_size: int) -> bool:
    """Whether what is asked of draws is of this vocabulary; the rest `can_sample` looks at."""
    return all_below((token for token, _ in spec.logit_bias), vocab_size) and all_below(
        spec.stop_ids, vocab_size
    )


def _is_receipt(receipt: ReceiptSpec) -> bool:
    confidence = receipt.exit_confidence
    sums = (receipt.loss, receipt.delay_s)
    # What was lost is counted as a share of the budget.
    budgeted = receipt.budget == 0.0 or receipt.budget >= _LEAST_BUDGET
    sure = confidence is None or is_share(confidence)
    return budgeted and sure and all(map(_is_sum, sums))


def _is_charge(charge: ChargeSpec, positions: int) -> bool:
    return 0 < charge.tokens <= positions and 0.0 <= charge.loss < math.inf


def _are_alternatives(top: Sequence[tuple[int, float]], vocab_size: int) -> bool:
    return len(top) <= vocab_size and all(
        0 <= token < vocab_size and logprob <= 0.0 for token, logprob in top
    )


def _are_scores(scores: Sequence[ScoreSpec], vocab_size: int, positions: int) -> bool:
    return len(scores) <= positions and all(
        0 <= one.token < vocab_size
        and one.logprob <= 0.0
        and 0 <= one.rank <= vocab_size
        and _are_alternatives(one.top, vocab_size)
        for one in scores
    )
