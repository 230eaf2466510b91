"""A draft head while it is fitted: the module that `models.draft_head` runs, for whole sequences.

Shapes: B sequences of T tokens, d the hidden size, V' tokens that can be named.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimmoe.models.draft_head import NORMS, Sizes

SOFT = 0.6
"""Share of the loss that is cross-entropy with the model's distribution; the rest is with the token
that it puts first."""
_ROWS = 8192
"""Rows whose logits exist at once."""
_ADDING, _DAMPED = ("mix", "down_1", "down_2"), 0.2
"""What adds to a state, and how large that is in the beginning."""


class DraftModule(nn.Module):
    """See `models.draft_head`."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.matrices = nn.ParameterDict(
            {
                name: _drawn(*shape, _DAMPED if name in _ADDING else 1.0)
                for name, shape in sizes.shapes.items()
            }
        )
        self.norms = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(sizes.hidden)) for name in NORMS}
        )

    def forward(self, states: Tensor, embedded: Tensor, drafts: int) -> list[Tensor]:
        """What the output head reads of every draft: for normed states [B, T, d] and the embeddings
        of the tokens that follow them [B, T, d], of the first one at each of the T positions, of
        the second at all but the last one, and so on, given what follows in the text."""
        keys, values = self._memory(states, embedded)
        made, read = states, []
        for ahead in range(drafts):
            length = states.shape[1] - ahead
            made = self._step(
                made[:, :length], embedded[:, ahead:], keys[:, :, :length], values, ahead
            )
            read.append(self._normed(made, "last_norm"))
        return read

    def _memory(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        both = self._times(self._pairs(states, embedded), "key_value")
        keys, values = self._split(both, 2 * self.sizes.kv_heads).chunk(2, 1)
        groups, keys = self.sizes.heads // self.sizes.kv_heads, self._turned(keys, 0)
        return keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)

    def _step(
        self, states: Tensor, embedded: Tensor, keys: Tensor, values: Tensor, ahead: int
    ) -> Tensor:
        made = self._times(self._pairs(states, embedded), "join")
        query = self._times(self._normed(made, "query_norm"), "query")
        query = self._turned(self._split(query, self.sizes.heads), ahead).to(values.dtype)
        mixed = F.scaled_dot_product_attention(
            query, keys.to(values.dtype), values[:, :, : keys.shape[2]], is_causal=True
        )
        made = made + self._times(mixed.transpose(1, 2).flatten(2), "mix")
        for layer in ("1", "2"):
            gate, up = self._times(self._normed(made, f"norm_{layer}"), f"up_{layer}").chunk(2, -1)
            made = made + self._times(F.silu(gate) * up, f"down_{layer}")
        return made

    def _times(self, rows: Tensor, name: str) -> Tensor:
        return F.linear(rows, self.matrices[name])

    def _split(self, rows: Tensor, heads: int) -> Tensor:
        """[B, T, heads * size] to [B, heads, T, size]."""
        return rows.unflatten(-1, (heads, -1)).transpose(1, 2)

    def _turned(self, rows: Tensor, ahead: int) -> Tensor:
        """Rows [B, heads, T, size] turned by position, the first being `ahead`."""
        size, length = self.sizes.head_size, rows.shape[2]
        steps = torch.arange(0, size, 2, device=rows.device).float() / size
        places = torch.arange(ahead, ahead + length, device=rows.device).float()
        angles = torch.outer(places, self.sizes.rope_theta**-steps).repeat(1, 2)
        half = size // 2
        swapped = torch.cat([-rows[..., half:], rows[..., :half]], -1)
        return rows * angles.cos() + swapped * angles.sin()

    def _pairs(self, states: Tensor, embedded: Tensor) -> Tensor:
        parts = self._normed(states, "state_norm"), self._normed(embedded, "token_norm")
        return torch.cat(parts, -1)

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        weight = self.norms[name]
        return F.rms_norm(rows.float(), rows.shape[-1:], weight, self.sizes.epsilon)


def _drawn(rows: int, columns: int, scale: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * scale / columns**0.5)


class NamedLoss(torch.autograd.Function):
    """Mean cross-entropy of what is named from states [n, d] by the output head's rows [V', d]:
    `SOFT` of it with the model's distribution, whose logits [n, V'] are given, and the rest with
    its first token. The gradient is made at once, a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor, logits: Tensor) -> Tensor:
        slope, total = torch.empty_like(states), torch.zeros((), device=states.device)
        for at in range(0, states.shape[0], _ROWS):
            part = slice(at, at + _ROWS)
            said, aim = (states[part] @ rows.T).float(), logits[part].float()
            first = aim.argmax(-1, keepdim=True)
            wanted = aim.softmax(-1).mul_(SOFT)
            wanted.scatter_add_(1, first, torch.full_like(first, 1.0 - SOFT, dtype=wanted.dtype))
            said = said.log_softmax(-1)
            total -= (wanted * said).sum()
            slope[part] = said.exp_().sub_(wanted).to(rows.dtype) @ rows
        ctx.save_for_backward(slope / states.shape[0])
        return total / states.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (slope,) = ctx.saved_tensors
        return slope * grads[0], None, None
