"""A served model's tokenizer, as the API uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from trimmoe.api.detokenise import TextStream
from trimmoe.api.errors import ApiError

_BROKEN = "\ufffd"


class TextCodec:
    """Text to tokens in a thread, because prompts may be long; tokens to text at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._one_at_a_time = asyncio.Lock()
        """Tokenizers may change their own settings in a call and bear no two at a time."""
        self.token_text = lru_cache(maxsize=65536)(self._token_text)

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a prompt, with those the model wants around it if they are `special`."""
        async with self._one_at_a_time:
            encoded = await asyncio.to_thread(
                self._tokenizer, text, add_special_tokens=special, verbose=False
            )
        return list(encoded["input_ids"])

    async def encode_chat(
        self, turns: list[dict[str, str]], *, answering: bool = True
    ) -> list[int]:
        """The tokens of a chat, up to where the assistant's turn begins if it is `answering`."""
        if not self._tokenizer.chat_template:
            raise ApiError(400, "This model has no chat template; use /v1/completions.")
        try:
            async with self._one_at_a_time:
                text = await asyncio.to_thread(
                    self._tokenizer.apply_chat_template,
                    turns,
                    add_generation_prompt=answering,
                    tokenize=False,
                )
        except Exception as error:  # Templates refuse turns in their own ways.
            raise ApiError(
                400,
                f"The model's chat template does not take these messages ({error}).",
                param="messages",
            ) from error
        # The template has put in the special tokens already.
        return await self.encode(text, special=False)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text as it is, without special tokens unless those are wanted."""
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )

    def stream(self) -> TextStream:
        return TextStream(self.decode)

    def _token_text(self, token: int) -> str:
        """One token alone, with its leading space, special or not."""
        once, twice = (
            self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for ids in ([token], [token, token])
        )
        # The first token of a text loses its leading space in some tokenizers, the second not.
        return twice[len(once) :]

    def token_bytes(self, token: int) -> list[int] | None:
        """UTF-8 of the token's text; None if it is only part of a character."""
        text = self.token_text(token)
        return None if _BROKEN in text else list(text.encode())
