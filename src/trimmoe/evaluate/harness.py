"""A driver as a model of the lm-evaluation-harness: any of its tasks under any policy and plan.

Prompts run exactly; what follows a prompt, scored or generated, is decoded under the policy, many
sequences together: generated token by token, scored layer by layer to the same effect. The first
token after a prompt is therefore predicted exactly, and a task whose answers are one token long
says nothing about a policy.

Importing this module needs the harness, see `require_harness`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from trimmoe.core.errors import UserError
from trimmoe.core.specs import IntArray
from trimmoe.evaluate.jobs import Forced, Generated, Job, run_jobs
from trimmoe.evaluate.scoring import Scoring
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.runtime.local import LocalDriver
from trimmoe.runtime.sampling import Sampling

DEFAULT_NEW_TOKENS = 256
"""Where a task does not say, as elsewhere in the harness."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """How requests meet the driver."""

    budget: float
    confidence: float
    at_once: int
    """Sequences decoded together; the driver has at least as many slots."""
    access: Callable[[int], IntArray]
    """Access server of each of so many requests, [requests]."""
    max_length: int
    """Positions used of the model's context: prompts lose their beginning beyond it."""
    seed: int = 0
    label: str = "trimmoe"
    scoring: Scoring = Scoring.LAYERS


@dataclass(kw_only=True, slots=True)
class Record:
    """What was executed since the record was last cleared, for who wants more than the scores."""

    forced: list[Forced] = field(default_factory=list)
    generated: list[Generated] = field(default_factory=list)


class DriverLM(TemplateLM):
    """A `LocalDriver` with its tokenizer, as the harness calls models."""

    def __init__(self, driver: LocalDriver, tokenizer: Any, serving: Serving) -> None:
        super().__init__()
        self.driver, self.tokenizer, self.serving = driver, tokenizer, serving
        self.backend = "seq2seq" if isinstance(driver.view, EncoderDecoderView) else "causal"
        self.record = Record()

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is predicted from."""
        found = self.tokenizer.bos_token_id
        found = self.tokenizer.eos_token_id if found is None else found
        if found is None:
            raise UserError(
                "The tokenizer has no token to begin a text with; give it a bos_token or an "
                "eos_token."
            )
        return found

    @property
    def max_length(self) -> int:
        return self.serving.max_length

    @property
    def max_gen_toks(self) -> int:
        return DEFAULT_NEW_TOKENS

    @property
    def batch_size(self) -> int:
        return self.serving.at_once

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        if add_special_tokens is None and self._begins_with_prefix(string):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, verbose=False, **special)

    def _begins_with_prefix(self, string: str) -> bool:
        bos = self.tokenizer.bos_token
        return bool(bos) and string.startswith(bos)

    def tok_decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation and whether it is the greedy one."""
        jobs = [self._forced(context, answer) for _, context, answer in requests]
        self._run([job for job in jobs if job.answer], "scoring")
        self.record.forced += [job for job in jobs if job.answer]
        results = [(sum(job.logprobs), job.is_greedy) for job in jobs]
        for (given, _, _), result in zip(requests, results, strict=True):
            if given is not None:
                self.cache_hook.add_partial("loglikelihood", given, result)
        return results

    def score_answers(self, pairs: list[tuple[str, str]]) -> list[Forced]:
        """Teacher-force answers after their prompts; the pairs that have a token to force."""
        jobs = [self._forced(*self._encode_pair(prompt, answer)) for prompt, answer in pairs]
        jobs = [job for job in jobs if job.answer]
        self._run(jobs, "reference answers")
        return jobs

    def _forced(self, context: list[int], answer: list[int]) -> Forced:
        limit = self.max_length
        if len(answer) > limit:
            raise UserError(
                f"A text to be scored has {len(answer)} tokens, at most {limit} fit; allow a "
                "longer context or choose another task."
            )
        # An encoder's input has a context of its own.
        room = limit if self.backend == "seq2seq" else limit + 1 - len(answer)
        return Forced(prompt=context[-room:], answer=answer)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, cut into windows without overlap of `max_length`."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        counts = []
        for request in requests:
            (text,) = request.args
            cut = [
                make_disjoint_window(pair)
                for pair in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            windows += [(None, context, answer) for context, answer in cut]
            counts.append(len(cut))
        scored = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(scored)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, each ending before the first of its stops."""
        asked: list[tuple[str, dict[str, Any]]] = [request.arguments for request in requests]
        untils = [_stops(options) for _, options in asked]
        jobs = [
            self._generated(number, context, options, until)
            for number, ((context, options), until) in enumerate(zip(asked, untils, strict=True))
        ]
        self._run(jobs, "generating")
        self.record.generated += jobs
        texts = [
            cut_at(self.tok_decode(job.made), until)
            for job, until in zip(jobs, untils, strict=True)
        ]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _generated(
        self, number: int, context: str, options: dict[str, Any], until: list[str]
    ) -> Generated:
        most = next((int(options[name]) for name in _LIMITS if name in options), self.max_gen_toks)
        room = self.max_length - (0 if self.backend == "seq2seq" else most)
        if most < 1 or room < 1 or most > self.max_length:
            raise UserError(
                f"A task asks for {most} new tokens, the context holds {self.max_length}; ask for "
                "fewer or allow a longer context."
            )
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        eos = self.tokenizer.eos_token_id
        return Generated(
            prompt=prompt[-room:],
            max_new_tokens=most,
            stop_tokens=() if eos is None else (eos,),
            has_ended=lambda made: any(stop in self.tok_decode(made) for stop in until),
            sampling=self._sampling(number, options),
        )

    def _sampling(self, number: int, options: dict[str, Any]) -> Sampling:
        temperature = float(options.get("temperature") or 0.0)
        if options.get("do_sample") is False:
            temperature = 0.0
        return Sampling(
            temperature=temperature,
            top_p=float(options.get("top_p") or 1.0),
            seed=self.serving.seed,
            stream=number,
        )

    def _run(self, jobs: list[Any], what: str) -> None:
        checked: list[Job] = jobs
        run_jobs(
            self.driver,
            checked,
            access=self.serving.access(len(checked)),
            budget=self.serving.budget,
            confidence=self.serving.confidence,
            at_once=self.serving.at_once,
            label=f"{self.serving.label}: {what}",
            scoring=self.serving.scoring,
        )


def _stops(options: dict[str, Any]) -> list[str]:
    until = options.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


def cut_at(text: str, stops: list[str]) -> str:
    """`text` before the first place where any of `stops` begins."""
    ends = [text.find(stop) for stop in stops]
    return text[: min((end for end in ends if end >= 0), default=len(text))]
