"""What transformers itself says, without a step for every token."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2MoeForCausalLM


@functools.cache
def opened(folder: Path) -> Any:
    """A checkpoint as transformers opens it."""
    return Qwen2MoeForCausalLM.from_pretrained(folder)


@torch.inference_mode()
def judged(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """What greedy decoding chooses after a prompt and after every part of an answer but the whole,
    as long as the answer: the same if it is what `generate` would give, and another one from the
    first token that is not, in one pass."""
    logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist()
