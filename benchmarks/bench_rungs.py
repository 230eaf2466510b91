"""What else could stand in for experts in so many bytes: how often predictions stay as they are.

    python benchmarks/bench_rungs.py --calibration FILE --text FILE [--text FILE]

All routed experts of the embedded model are replaced at once and none is held. What is there today
is `fitted to inputs`; the others are what it is compared with: the same not fitted, fitted to what
each expert's matrices read by themselves or only to the norm's weights, half of a layer's experts
in more bits, GPTQ, which passes the error of each column on to the next ones by all products of
what is read, a part of low rank on top, and a router fitted to states as copies leave them. Bits
are those of a weight with its share of scale, offset and low rank. Nothing here is timed: the same
inputs give the same figures. Runs transformers' modules.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from bench_agreement import predictions
from trimmoe.calibrate.text import read_texts, token_windows
from trimmoe.core.precision import GROUP, bits_in_groups
from trimmoe.experiments.opening import resolved
from trimmoe.models.compiled.quantise import pack_few
from trimmoe.models.compiled.rounding import fit
from trimmoe.models.load import load_tokenizer

_WINDOW = 256
_RIDGE, _ROUTER_RIDGE = 0.05, 0.1
"""Shares of the mean square of what is read that are added to all squares."""
_RANKS = (4, 8)
_ROUTED = ("2 bits, not fitted", "2 bits, fitted to inputs", "2 bits, GPTQ")
"""With which routers are fitted too."""

Made = Callable[["Part"], Tensor]


@dataclass(kw_only=True)
class Part:
    """One of the two stacks of matrices [E, J, K] that a layer's experts are made of."""

    parameter: nn.Parameter
    whole: Tensor
    products: Tensor
    """Of what each expert's matrix reads, weighted by its gates, [E, K, K]."""
    runs: Tensor
    """How often each expert runs, [E]."""
    norm: Tensor | None
    """Squares of the weights of the norm before it, [K]; None of what reads no states."""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """By GPTQ, by bits."""

    @property
    def squares(self) -> Tensor:
        """Of what each expert's matrix reads, [E, K]."""
        return self.products.diagonal(dim1=1, dim2=2)

    def packed(self, bits: int, squares: Tensor | None = None) -> Tensor:
        """As `trimmoe` packs it, fitted to the mean squares of what experts read, [K] of all or
        [E, K] of each."""
        rows, found = self.whole.shape[1], []
        for at, one in enumerate(self.whole):
            its = squares if squares is None or squares.ndim == 1 else squares[at]
            few = pack_few(one.numpy(), bits, None if its is None else its.numpy())
            found.append(torch.from_numpy(few.restored[:rows].copy()))
        return torch.stack(found)

    def fitted(self, bits: int) -> Tensor:
        """As servers have it: what reads states is fitted to what all of a layer's experts read."""
        return self.packed(bits, None if self.norm is None else self.squares.sum(0))

    def mixed(self, few: int, many: int) -> Tensor:
        """Half of the experts, those that run often, in many bits."""
        often = self.runs.argsort(descending=True)[: len(self.runs) // 2]
        found = self.packed(few)
        found[often] = self.packed(many)[often]
        return found

    @property
    def eased(self) -> Tensor:
        """The products over their mean square, with the ridge, [E, K, K]."""
        mean = self.squares.mean(1).clamp(min=1e-9)
        return self.products / mean[:, None, None] + _RIDGE * torch.eye(self.products.shape[1])

    def by_gptq(self, bits: int) -> Tensor:
        if bits not in self.kept:
            self.kept[bits] = gptq(self.whole, self.eased, bits)
        return self.kept[bits]

    def with_low_rank(self, few: Tensor, rank: int) -> Tensor:
        """Few bits and, of what they lack, what matters most of what is read."""
        root = torch.linalg.cholesky(self.eased)
        left, sizes, right = torch.linalg.svd((self.whole - few) @ root, full_matrices=False)
        give = left[..., :rank] * sizes[..., None, :rank]
        read = torch.linalg.solve_triangular(root, right[..., :rank, :], upper=False, left=False)
        return few + give.bfloat16().float() @ read.bfloat16().float()


def gptq(weights: Tensor, products: Tensor, bits: int) -> Tensor:
    """Matrices [E, J, K] in few bits, column by column, each error made good by later columns."""
    left, found = weights.clone(), torch.zeros_like(weights)
    inverse = torch.stack(
        [torch.cholesky_inverse(torch.linalg.cholesky(each.double())) for each in products]
    )
    upper = torch.stack([torch.linalg.cholesky(each).mT.float() for each in inverse])
    squares, top = products.diagonal(dim1=1, dim2=2), (1 << bits) - 1
    scale = offset = torch.zeros(())
    for k in range(weights.shape[2]):
        if k % GROUP == 0:
            here = slice(k, k + GROUP)
            scale, offset = _grid(left[:, :, here], squares[:, here], bits)
        column = left[:, :, k : k + 1]
        number = ((column - offset) / scale).round().clamp(0, top)
        found[:, :, k : k + 1] = number * scale + offset
        error = (column - found[:, :, k : k + 1]) / upper[:, k, k, None, None]
        left[:, :, k:] -= error * upper[:, k, None, k:]
    return found


def _grid(group: Tensor, squares: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and offset of a group of columns [E, J, g], [E, J, 1] each, as it is packed."""
    both = []
    for weights, counts in zip(group, squares, strict=True):
        found = fit(weights.numpy()[:, None], bits, counts.numpy()[None])
        both.append(torch.stack([torch.from_numpy(each) for each in found.held]))
    scale, offset = torch.stack(both, dim=1)
    return torch.where(scale.abs() < 1e-12, 1e-12, scale), offset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    options = parser.parse_args()
    path = resolved(options.model)
    # Its experts are looked into one by one.
    settings: dict[str, Any] = {"experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **settings).eval()
    tokenizer = load_tokenizer(path)

    def windows(file: Path, tokens: int) -> Tensor:
        texts = read_texts([file])
        ids = token_windows(texts, tokenizer=tokenizer, tokens=tokens, window=_WINDOW, seed=0)
        return torch.from_numpy(ids)

    told = windows(options.calibration, options.calibration_tokens)
    texts = {file.name: windows(file, options.tokens) for file in options.text}
    blocks = [layer.mlp for layer in _layers(model)]
    parts = parts_of(model, told)
    whole = {name: predictions(model, ids)[0] for name, ids in texts.items()}
    print(f"| instead of all experts | bits | {' | '.join(texts)} |")
    print("|---" * (2 + len(texts)) + "|")

    def report(name: str, bits: float) -> None:
        same = [(predictions(model, ids)[0] == whole[text]) for text, ids in texts.items()]
        shares = " | ".join(f"{one.float().mean():.1%}" for one in same)
        print(f"| {name} | {bits:.1f} | {shares} |", flush=True)

    for name, bits, made in _rungs(parts):
        for part in parts:
            part.parameter.data = made(part)
        report(name, bits)
        if name in _ROUTED:
            with router_fitted(model, blocks, parts, told):
                report(f"{name}, router fitted", bits)


def _rungs(parts: list[Part]) -> Iterator[tuple[str, float, Made]]:
    """Their names, their bits, and what is made of a part."""
    for bits in (2, 3, 4):
        size = bits_in_groups(bits)
        yield f"{bits} bits, not fitted", size, lambda part, bits=bits: part.packed(bits)
        yield f"{bits} bits, fitted to inputs", size, lambda part, bits=bits: part.fitted(bits)
        yield (
            f"{bits} bits, each expert's matrices fitted",
            size,
            lambda part, bits=bits: part.packed(bits, part.squares),
        )
        yield (
            f"{bits} bits, fitted to the norm's weights",
            size,
            lambda part, bits=bits: part.packed(bits, part.norm),
        )
        yield f"{bits} bits, GPTQ", size, lambda part, bits=bits: part.by_gptq(bits)
    halves = (bits_in_groups(2) + bits_in_groups(4)) / 2
    yield "half in 2, half in 4 bits, not fitted", halves, lambda part: part.mixed(2, 4)
    weights = sum(part.whole[0].numel() for part in parts)
    ends = sum(sum(part.whole.shape[1:]) for part in parts)
    for rank in _RANKS:
        yield (
            f"two bits, GPTQ, and rank {rank}",
            bits_in_groups(2) + 16 * rank * ends / weights,
            lambda part, rank=rank: part.with_low_rank(part.by_gptq(2), rank),
        )


def _layers(model: nn.Module) -> Any:
    return model.get_submodule("model").layers


@torch.inference_mode()
def parts_of(model: nn.Module, told: Tensor) -> list[Part]:
    """The stacks of all layers' experts, with what a text has them read."""
    found, hooks = [], []
    for layer in _layers(model):
        experts, norm = layer.mlp.experts, layer.post_attention_layernorm.weight.square()
        stacks, runs = (experts.gate_up_proj, experts.down_proj), torch.zeros(experts.num_experts)
        both = [
            Part(
                parameter=one,
                whole=one.data.clone(),
                products=torch.zeros(one.shape[0], one.shape[2], one.shape[2]),
                runs=runs,
                norm=norm if one is stacks[0] else None,
            )
            for one in stacks
        ]
        hooks.append(experts.register_forward_pre_hook(partial(_seen, both)))
        found += both
    for some in told.split(8):
        model.get_submodule("model")(some)
    for hook in hooks:
        hook.remove()
    return found


def _seen(both: list[Part], experts: Any, args: tuple[Tensor, Tensor, Tensor]) -> None:
    """Add what a batch has a layer's experts read."""
    states, chosen, gates = args
    up, down = both
    for expert, weights in enumerate(up.whole):
        rows, slots = torch.nonzero(chosen == expert, as_tuple=True)
        gate, read = gates[rows, slots, None], states[rows]
        first, second = nn.functional.linear(read, weights).chunk(2, dim=-1)
        for part, each in (up, gate * read), (down, gate * experts.act_fn(first) * second):
            part.products[expert] += each.T @ each
        up.runs[expert] += len(rows)


@contextmanager
def router_fitted(
    model: nn.Module, blocks: list[Any], parts: list[Part], told: Tensor
) -> Iterator[None]:
    """Routers that give of states as copies leave them what they gave of those without, by least
    squares."""
    met, few = _router_inputs(model, blocks, told), [part.parameter.data for part in parts]
    for part in parts:
        part.parameter.data = part.whole
    true = _router_inputs(model, blocks, told)
    before = [block.gate.weight.data for block in blocks]
    for part, one in zip(parts, few, strict=True):
        part.parameter.data = one
    for block, x, of in zip(blocks, met, true, strict=True):
        weight, products = block.gate.weight.data, x.T @ x
        products += _ROUTER_RIDGE * products.diagonal().mean() * torch.eye(len(products))
        block.gate.weight.data = weight + torch.linalg.solve(products, x.T @ (of - x) @ weight.T).T
    yield
    for block, weight in zip(blocks, before, strict=True):
        block.gate.weight.data = weight


@torch.inference_mode()
def _router_inputs(model: nn.Module, blocks: list[Any], told: Tensor) -> list[Tensor]:
    """What every router reads of a text, [T, d] each."""
    found: list[list[Tensor]] = [[] for _ in blocks]
    hooks = [
        block.gate.register_forward_pre_hook(
            lambda _, args, its=its: its.append(args[0].flatten(0, -2).clone())
        )
        for block, its in zip(blocks, found, strict=True)
    ]
    for some in told[: len(told) // 2].split(8):
        model.get_submodule("model")(some)
    for hook in hooks:
        hook.remove()
    return [torch.cat(its) for its in found]


if __name__ == "__main__":
    main()
