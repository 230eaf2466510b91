"""A served model's tokenizer, as the API uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
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

    @property
    def chats(self) -> bool:
        """Whether the model has a form for chats."""
        return bool(self._tokenizer.chat_template)

    def chat_template(self, *, tools: bool = False) -> str:
        """The model's chat template, for chats with tools if it has one of its own for them."""
        if not self.chats:
            raise ApiError(400, "This model has no chat template; use /v1/completions.")
        return self._tokenizer.get_chat_template(tools=[{}] if tools else None)

    async def encode_chat(
        self,
        turns: list[dict[str, Any]],
        *,
        answering: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """The tokens of a chat, up to where the assistant's turn begins if it is `answering`."""
        self.chat_template()
        try:
            async with self._one_at_a_time:
                text = await asyncio.to_thread(
                    self._tokenizer.apply_chat_template,
                    turns,
                    tools=tools,
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

    def stream(self, keep: Collection[str] = ()) -> TextStream:
        """Text as it grows, without special tokens but for those to `keep`."""
        kept = {token for each in keep if (token := self.token_of(each)) is not None}
        if not kept:
            return TextStream(self.decode)
        hidden = self._special - kept
        return TextStream(
            lambda tokens: self.decode([one for one in tokens if one not in hidden], special=True)
        )

    @cached_property
    def _special(self) -> frozenset[int]:
        """Tokens that are not shown."""
        added = self._tokenizer.added_tokens_decoder
        marked = (token for token, told in added.items() if told.special)
        return frozenset([*self._tokenizer.all_special_ids, *marked])

    def token_of(self, text: str) -> int | None:
        """The one token that a text is, if it is one that is not made of others."""
        return self._tokenizer.get_added_vocab().get(text)

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
