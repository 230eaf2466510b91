"""Scores of a checkpoint on the tasks' parts that were never trained on, in transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimmoe.evaluate.squad import process_results

from .tasks import gsm8k_problems, gsm8k_prompt, squad_paragraphs, squad_prompt

BATCH = 16
SQUAD_TOKENS = 32
GSM8K_TOKENS = 128
_RESULT = re.compile(r"#### (-?[0-9.,]+)")


def spread_over(items: Sequence, count: int) -> list:
    """`count` of the items at even distances, so that every article has a part."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def task_scores(checkpoint: Path, path: Path, count: int) -> dict[str, float]:
    """SQuAD's F1 and exact match, or GSM8K's exact match and share of the worked answers' tokens
    that the model names, from the exact model and without examples."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    if path.suffix == ".json":
        groups = squad_paragraphs(path, held_out=True)
        return _squad(model, tokenizer, spread_over([a for g in groups for a in g], count))
    return _gsm8k(model, tokenizer, spread_over(gsm8k_problems(path, held_out=True), count))


def _squad(model: Any, tokenizer: Any, asked: list[dict]) -> dict[str, float]:
    said = continuations(model, tokenizer, list(map(squad_prompt, asked)), SQUAD_TOKENS)
    scores = [
        process_results(one, [text.split("\n")[0]]) for one, text in zip(asked, said, strict=True)
    ]
    means = {name: sum(score[name] for score in scores) / len(scores) for name in scores[0]}
    return {"questions": len(asked)} | {name: round(mean, 4) for name, mean in means.items()}


def _gsm8k(model: Any, tokenizer: Any, problems: list[dict]) -> dict[str, float]:
    said = continuations(model, tokenizer, list(map(gsm8k_prompt, problems)), GSM8K_TOKENS)
    right = [
        gsm8k_result(t) == gsm8k_result(p["answer"]) for p, t in zip(problems, said, strict=True)
    ]
    return {
        "questions": len(problems),
        "exact_match": round(sum(right) / len(right), 4),
        "answer_tokens_named": round(_named(model, tokenizer, problems), 4),
    }


def gsm8k_result(text: str) -> str | None:
    """The number that an answer ends with; of what follows another question nothing counts."""
    found = _RESULT.search(text.split("Question:")[0])
    return found[1].replace(",", "").rstrip(".") if found else None


@torch.inference_mode()
def continuations(model: Any, tokenizer: Any, prompts: list[str], tokens: int) -> list[str]:
    """Greedy continuations of at most `tokens` tokens."""
    found = []
    for start in range(0, len(prompts), BATCH):
        ids = tokenizer(prompts[start : start + BATCH], return_tensors="pt", padding=True)
        out = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
        new = out[:, ids["input_ids"].shape[1] :]
        found += tokenizer.batch_decode(new, skip_special_tokens=True)
    return found


@torch.inference_mode()
def _named(model: Any, tokenizer: Any, problems: list[dict]) -> float:
    """Share of the worked answers' tokens that are the likeliest after what precedes them."""
    hits = count = 0
    for problem in problems:
        asked = tokenizer(gsm8k_prompt(problem), return_tensors="pt")["input_ids"]
        answer = tokenizer(f" {problem['answer']}", return_tensors="pt")["input_ids"]
        logits = model(torch.cat([asked, answer], dim=1)).logits[0, asked.shape[1] - 1 : -1]
        hits += int((logits.argmax(-1) == answer[0]).sum())
        count += answer.shape[1]
    return hits / count
