"""Draft heads of random weights, and what they compute, written plainly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.draft_chains import Chain, Floats
from trimmoe.models.draft_head import NORMS, DraftHead, HeadMemory, HeadWeights, Sizes


def random_head(
    hidden: int,
    vocabulary: int,
    *,
    seed: int = 0,
    frequent: Sequence[int] | None = None,
    inner: int = 64,
) -> HeadWeights:
    """With weights that keep states of about the size that they have."""
    draws = np.random.default_rng(seed)
    sizes = Sizes(
        hidden=hidden, heads=4, kv_heads=2, head_size=32, inner=inner, rope_theta=1e4, epsilon=1e-5
    )
    return HeadWeights(
        sizes=sizes,
        matrices={
            name: (draws.normal(size=shape) / shape[1] ** 0.5).astype(np.float32)
            for name, shape in sizes.shapes.items()
        },
        norms={name: draws.uniform(0.5, 1.5, hidden).astype(np.float32) for name in NORMS},
        frequent=np.arange(vocabulary) if frequent is None else np.array(sorted(frequent)),
        right=(0.7, 0.6),
    )


def _doubles(parts: Mapping[str, Floats]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(part).double() for name, part in parts.items()}


class PlainHead:
    """What a head says, for whole sequences and in full precision."""

    def __init__(self, weights: HeadWeights, head: Tensor, embedding: Tensor) -> None:
        """`head` and `embedding` [V, d]."""
        self.sizes, self._frequent = weights.sizes, torch.from_numpy(weights.frequent)
        self._of = {
            name: torch.from_numpy(part).double() for name, part in weights.matrices.items()
        }
        self._norms = {
            name: torch.from_numpy(part).double() for name, part in weights.norms.items()
        }
        self._head, self._embedding = head.double()[self._frequent], embedding.double()

    def scores(self, states: Tensor, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """Logits of the frequent tokens after the last of `tokens` [n], whose predecessors had the
        normed `states` [n - 1, d], and after each of `drafts` upon it, [1 + m, V']."""
        states = states.double()
        pairs = self._pairs(states, self._embedding[list(tokens[1:])])
        keys, values = (pairs @ self._of["key_value"].T).chunk(2, -1)
        places = torch.arange(len(pairs)).double()
        keys = self._turned(self._split(keys, self.sizes.kv_heads), places)
        values = self._split(values, self.sizes.kv_heads)
        state, read, said = states[-1:], int(tokens[-1]), []
        for ahead, following in enumerate([*drafts, -1]):
            made = self._pairs(state, self._embedding[[read]]) @ self._of["join"].T
            query = self._normed(made, "query_norm") @ self._of["query"].T
            at = torch.tensor([len(pairs) - 1.0 + ahead]).double()
            query = self._turned(self._split(query, self.sizes.heads), at)
            groups = self.sizes.heads // self.sizes.kv_heads
            mixed = F.scaled_dot_product_attention(
                query, keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
            )
            made = made + mixed.transpose(0, 1).flatten(1) @ self._of["mix"].T
            for layer in ("1", "2"):
                gate, up = (self._normed(made, f"norm_{layer}") @ self._of[f"up_{layer}"].T).chunk(
                    2, -1
                )
                made = made + (F.silu(gate) * up) @ self._of[f"down_{layer}"].T
            said.append(self._normed(made, "last_norm") @ self._head.T)
            state, read = made, following
        return torch.cat(said)

    def _split(self, rows: Tensor, heads: int) -> Tensor:
        """[n, heads * size] to [heads, n, size]."""
        return rows.unflatten(1, (heads, -1)).transpose(0, 1)

    def _turned(self, rows: Tensor, places: Tensor) -> Tensor:
        size = self.sizes.head_size
        inverse = self.sizes.rope_theta ** -(torch.arange(0, size, 2).double() / size)
        angles = torch.outer(places, torch.cat([inverse, inverse]))
        half = size // 2
        swapped = torch.cat([-rows[..., half:], rows[..., :half]], -1)
        return rows * angles.cos() + swapped * angles.sin()

    def _pairs(self, states: Tensor, embedded: Tensor) -> Tensor:
        parts = self._normed(states, "state_norm"), self._normed(embedded, "token_norm")
        return torch.cat(parts, -1)

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        return F.rms_norm(rows, rows.shape[-1:], self._norms[name], self.sizes.epsilon)


class Oracle(DraftHead):
    """Knows the answers, and is wrong every so often."""

    def __init__(self, view: CompiledView, *, wrong_every: int) -> None:
        weights = random_head(view.spec.hidden_size, view.spec.vocab_size)
        super().__init__(weights, view.head_rows, view.token_rows)
        self.texts: list[list[int]] = []
        self.wrong_every, self.asked = wrong_every, 0
        self.most: list[int] = []

    def draft_all(self, chains: Sequence[Chain[HeadMemory]]) -> None:
        self.most += [one.most for one in chains]
        if not self.texts:
            super().draft_all(chains)
            return
        for one in chains:
            one.drafted += self._known(one.position, one.token, one.most)

    def _known(self, position: int, token: int, most: int) -> list[int]:
        for text in self.texts:
            if text[position : position + 1] == [token]:
                found = text[position + 1 : position + 1 + most]
                self.asked += 1
                if found and self.asked % self.wrong_every == 0:
                    at = self.asked % len(found)
                    found[at] = (found[at] + 1) % 256
                return found
        return []
