"""What is in a message: whose work it is, and how many hidden vectors."""

from __future__ import annotations

from trimmoe.runtime.node.records.messages import (
    Dispatch,
    Followed,
    Message,
    Onward,
    Parcel,
    Partial,
    Prompt,
    Propagate,
    Reserve,
    Start,
    Tokens,
)


def affected(message: Message) -> list[int]:
    """Sequences that a lost message harms."""
    match message:
        case Start() | Dispatch() | Partial() | Onward() | Propagate():
            return list(message.rows.sequences)
        case Tokens():
            return [token.sequence for token in message.tokens]
        case Followed():
            return [after.sequence for after in message.after if after.token is not None]
        case Prompt() | Reserve():
            return [message.sequence]
        case _:
            return []


def vectors_of(parcel: Parcel) -> int:
    """Hidden vectors of generated tokens in a parcel, as ledgers count them."""
    message = parcel.message
    if isinstance(message, Propagate):
        return message.rows.total
    if isinstance(message, (Dispatch, Partial, Onward)) and message.decoding:
        return message.rows.total
    return 0
