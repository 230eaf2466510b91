"""Small things that completions and chats write alike."""

from __future__ import annotations

from trimmoe.api.generation import Piece
from trimmoe.api.responses import PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob
from trimmoe.api.text import TextCodec
from trimmoe.runtime.service import TokenEvent

LEAST_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI's servers write this for it."""


def finite(logprob: float | None) -> float:
    """A logprob that JSON can carry."""
    assert logprob is not None, "the request asked for logprobs"
    return max(logprob, LEAST_LOGPROB)


def shown_tokens(piece: Piece) -> list[TokenEvent]:
    """The piece's tokens without the one that ended the answer, which has no text in it."""
    return [event for event in piece.tokens if event.finish_reason != "stop"]


def token_logprobs(piece: Piece, codec: TextCodec) -> list[TokenLogprob]:
    """One entry for each token of a piece that asked for logprobs."""

    def told(token: int, logprob: float | None) -> TopLogprob:
        return TopLogprob(
            token=codec.token_text(token),
            logprob=finite(logprob),
            bytes=codec.token_bytes(token),
        )

    return [
        TokenLogprob(
            **told(event.token, event.logprob).model_dump(),
            top_logprobs=[told(*one) for one in event.top_logprobs],
        )
        for event in shown_tokens(piece)
    ]


def prompt_logprobs(piece: Piece, codec: TextCodec) -> PromptLogprobs:
    """What a whole answer's first token brings of its prompt."""
    told: PromptLogprobs = [None]
    for score in piece.tokens[0].prompt:
        at = {
            str(token): PromptLogprob(
                logprob=finite(logprob), rank=rank, decoded_token=codec.token_text(token)
            )
            for rank, (token, logprob) in enumerate(score.top, start=1)
        }
        own = codec.token_text(score.token)
        at[str(score.token)] = PromptLogprob(
            logprob=finite(score.logprob), rank=score.rank, decoded_token=own
        )
        told.append(at)
    return told
