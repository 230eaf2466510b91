"""The driver as a model of the lm-evaluation-harness, against transformers and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import Qwen2MoeForCausalLM

import checkpoints
from evaluating import Bench, make_bench
from factories import random_cluster, random_profile
from synthetic import random_plan
from trimmoe.core.errors import UserError
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.evaluate.harness import DriverLM, cut_at
from trimmoe.evaluate.jobs import Forced
from trimmoe.evaluate.reference import ExactReference
from trimmoe.models.base import MoEView
from trimmoe.models.cache import cache_argument
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.load import open_model
from trimmoe.policy.presets import exact, trimmoe

PAIRS = [
    ("The lobster is", " blue"),
    ("", "a text without any context"),
    ("Ends in a space ", "and goes on"),
    ("x", "y"),
    ("Numbers: 1 2 3", " 4 5 6 7 8 9 10 11 12"),
]
PROMPTS = ["The lobster is", "Question: 1 + 1?\nAnswer:", "z", "Once upon a time there was"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(bench: Bench) -> Any:
    return Qwen2MoeForCausalLM.from_pretrained(bench.folder).eval()


def instances(kind: Any, arguments: list[tuple]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("t", index, 1))
        for index, each in enumerate(arguments)
    ]


def reference_score(
    bench: Bench, reference: Any, context: list[int], answer: list[int]
) -> tuple[float, bool]:
    """Log-likelihood of `answer` after `context` and whether it is greedy, by transformers."""
    logits = checkpoints.logits_before(reference, context, answer)
    scores = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
    return float(scores.sum()), logits.argmax(-1).tolist() == answer


def test_exact_log_likelihoods_are_those_of_transformers(bench: Bench, reference: Any) -> None:
    results = bench.model(exact()).loglikelihood(
        instances("loglikelihood", PAIRS), disable_tqdm=True
    )
    begin = bench.tokenizer.bos_token_id
    for (context, answer), (score, greedy) in zip(PAIRS, results, strict=True):
        # The harness counts spaces at the end of a context to the answer.
        head, tail = context.rstrip(), context[len(context.rstrip()) :] + answer
        expected = reference_score(
            bench, reference, bench.tokenizer.encode(head) or [begin], bench.tokenizer.encode(tail)
        )
        assert score == pytest.approx(expected[0], abs=1e-4)
        assert greedy == expected[1]


def reference_logits(
    view: MoEView, reference: Any, context: list[int], answer: list[int]
) -> torch.Tensor:
    """Before each token of `answer` by transformers, [n, V]; a decoder is fed token by token."""
    if not isinstance(view, EncoderDecoderView):
        return checkpoints.logits_before(reference, context, answer)
    with torch.no_grad():
        named, cache, rows = cache_argument(reference), None, []
        read = reference.get_encoder()(torch.tensor([context]))
        for token in [view.start_token, *answer[:-1]]:
            output = reference(
                encoder_outputs=read, decoder_input_ids=torch.tensor([[token]]),
                use_cache=True, **{named: cache},
            )  # fmt: skip
            cache = output[named]
            rows.append(output.logits[0, -1])
        return torch.stack(rows)


@pytest.mark.parametrize("family", [*checkpoints.DECODERS, "switch"])
def test_every_family_scores_as_transformers_does(tmp_path: Path, family: str) -> None:
    """Token ids instead of texts; with an encoder, the context is what it reads."""
    folder = checkpoints.write(family, tmp_path)
    view = open_model(folder)
    rng = np.random.default_rng(2)
    bench = Bench(
        folder=folder,
        view=view,
        tokenizer=None,
        profile=random_profile(rng, view.spec),
        plan=random_plan(rng, view.spec, random_cluster(rng, servers=4)),
    )
    pairs = [
        (rng.integers(3, 96, before).tolist(), rng.integers(3, 96, after).tolist())
        for before, after in ((5, 4), (1, 9), (12, 1), (7, 7))
    ]
    scored = bench.model(exact(), max_length=64)._loglikelihood_tokens(
        [(None, context, answer) for context, answer in pairs]
    )
    judged = ExactReference(view)
    reference = checkpoints.reference(folder)
    for (context, answer), (score, greedy) in zip(pairs, scored, strict=True):
        logits = reference_logits(view, reference, context, answer)
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert score == pytest.approx(float(wanted.sum()), abs=1e-4)
        assert greedy == (logits.argmax(-1).tolist() == answer)
        (told,) = judged.answers([Forced(prompt=context, answer=answer)])
        assert told.logprobs == pytest.approx(wanted.numpy(), abs=1e-4)
        assert told.predictions.tolist() == logits.argmax(-1).tolist()


def test_what_the_model_itself_generates_is_greedy(bench: Bench) -> None:
    model = bench.model(exact())
    options = {"until": [], "max_gen_toks": 12}
    for prompt in PROMPTS:
        (job,) = [model._generated(0, prompt, options, [])]
        model._run([job], "")
        (forced,) = [model._forced(list(job.prompt), job.made)]
        model._run([forced], "")
        assert forced.is_greedy
        assert forced.predictions == job.made


def test_rolling_log_likelihood_predicts_every_token_once_in_windows(
    bench: Bench, reference: Any
) -> None:
    text = "All of this text is predicted, window by window, without overlap."
    ids, limit = bench.tokenizer.encode(text), 16
    (total,) = bench.model(exact(), max_length=limit).loglikelihood_rolling(
        instances("loglikelihood_rolling", [(text,)])
    )
    begin, expected, start = bench.tokenizer.bos_token_id, 0.0, 0
    while start < len(ids):
        end = min(start + limit, len(ids))
        # The last window is as long as the others; only what is new in it counts.
        first = max(0, end - limit)
        context = [begin] if first == 0 else ids[first - 1 : start]
        if first == 0:
            context = [begin, *ids[:start]]
        expected += reference_score(bench, reference, context, ids[start:end])[0]
        start = end
    assert total == pytest.approx(expected, abs=1e-4)


def test_long_contexts_lose_their_beginning(bench: Bench, reference: Any) -> None:
    limit, context, answer = 20, "0123456789" * 5, " the end"
    model = bench.model(exact(), max_length=limit)
    ((score, _),) = model.loglikelihood(
        instances("loglikelihood", [(context, answer)]), disable_tqdm=True
    )
    ids, wanted = bench.tokenizer.encode(context), bench.tokenizer.encode(answer)
    kept = ids[-(limit + 1 - len(wanted)) :]
    expected, _ = reference_score(bench, reference, kept, wanted)
    assert score == pytest.approx(expected, abs=1e-4)
    job = model._generated(0, context, {"max_gen_toks": 6}, [])
    assert list(job.prompt) == ids[-(limit - 6) :]


def test_generation_is_that_of_transformers(bench: Bench, reference: Any) -> None:
    options = {"until": ["\n\n"], "max_gen_toks": 24, "temperature": 0.0, "do_sample": False}
    texts = bench.model(exact()).generate_until(
        instances("generate_until", [(prompt, options) for prompt in PROMPTS])
    )
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = torch.tensor([bench.tokenizer.encode(prompt)])
        made = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
            eos_token_id=bench.tokenizer.eos_token_id, pad_token_id=258,
        )[0, ids.shape[1] :]  # fmt: skip
        expected = bench.tokenizer.decode(made, skip_special_tokens=True)
        assert text == cut_at(expected, ["\n\n"])


def test_generation_stops_at_the_first_of_its_stops(bench: Bench) -> None:
    """Stops taken from what is generated without them."""
    model = bench.model(exact())
    options = {"until": [], "max_gen_toks": 30}
    (whole,) = model.generate_until(instances("generate_until", [(PROMPTS[0], options)]))
    stop = whole[8:10]
    stopped, once = model.generate_until(
        instances(
            "generate_until",
            [
                (PROMPTS[0], options | {"until": ["never there", stop]}),
                (PROMPTS[0], options | {"until": stop, "max_gen_toks": 1}),
            ],
        )
    )
    assert stopped == whole[: whole.index(stop)]
    assert len(model.record.generated[-2].made) < len(model.record.generated[0].made)
    assert len(model.record.generated[-1].made) == 1
    assert whole.startswith(once)


def test_the_answer_does_not_depend_on_what_is_decoded_beside_it(bench: Bench) -> None:
    requests = instances("loglikelihood", PAIRS)
    together = bench.model(exact(), at_once=5).loglikelihood(requests, disable_tqdm=True)
    alone = bench.model(exact(), at_once=1).loglikelihood(requests, disable_tqdm=True)
    for one, other in zip(together, alone, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-4)
        assert one[1] == other[1]


def everything_skipped(bench: Bench) -> DriverLM:
    """So large a budget that hardly a slot runs."""
    policy = trimmoe().but(budget=100.0, exit_risk=None, audit_share=0.0, inflate=False)
    return bench.model(replace(policy, confidence=2.0))


def test_continuations_run_under_the_policy_token_by_token_and_contexts_exactly(
    bench: Bench,
) -> None:
    """The same tokens through the driver by hand, and the first one as the exact model has it."""
    model, by_hand = everything_skipped(bench), everything_skipped(bench).driver
    policy = model.driver.engine.settings
    context, answer = "Numbers: 1 2 3", " 4 5 6 7 8 9 10 11 12"
    ((score, _),) = model.loglikelihood(
        instances("loglikelihood", [(context, answer)]), disable_tqdm=True
    )
    ids, wanted = bench.tokenizer.encode(context), bench.tokenizer.encode(answer)
    logits = by_hand.open(
        0, ids, access=int(model.serving.access(1)[0]), budget=policy.budget, confidence=2.0
    )
    expected, ledger = 0.0, Ledger.empty(4, 4, bench.view.spec.hidden_bytes)
    for token in wanted:
        expected += float(logits.log_softmax(-1)[token])
        (decoded,) = by_hand.decode({0: token})
        logits = decoded.logits
        if token is not wanted[-1]:
            ledger = ledger + decoded.ledger
    assert score == pytest.approx(expected, abs=1e-5)
    (forced,) = model.record.forced
    assert forced.ledger is not None
    assert forced.ledger.tokens == len(wanted) - 1
    assert forced.ledger.share(Kind.SKIPPED) > 0
    exact_model = bench.model(exact())
    ((exact_score, _),) = exact_model.loglikelihood(
        instances("loglikelihood", [(context, answer)]), disable_tqdm=True
    )
    assert score != pytest.approx(exact_score, abs=1e-3)
    assert forced.logprobs[0] == pytest.approx(exact_model.record.forced[0].logprobs[0], abs=1e-5)


def test_agreement_counts_decoded_tokens_that_the_exact_model_predicts_otherwise(
    bench: Bench,
) -> None:
    context, answer = bench.tokenizer.encode("Numbers: 1 2 3"), bench.tokenizer.encode(" 4 5 6 7 8")
    reference = ExactReference(bench.view)
    (told,) = reference.answers([Forced(prompt=context, answer=answer)])
    right = told.predictions.tolist()
    wrong = [token + 1 for token in right]
    ledger = Ledger.empty(4, 4, bench.view.spec.hidden_bytes)
    forced = Forced(
        prompt=context, answer=answer, predictions=[*wrong[:3], *right[3:]],
        logprobs=told.logprobs.tolist(), ledger=replace(ledger, tokens=len(answer) - 1),
    )  # fmt: skip
    single = Forced(prompt=context, answer=answer[:1], predictions=[wrong[0]], logprobs=[-1.0])
    scored = reference.score([forced, single])
    assert scored is not None
    # The prompt made the first prediction, and an answer of one token has no other.
    assert (scored.flips, scored.tokens) == (2, len(answer) - 1)
    assert scored.nll == pytest.approx(reference.nll([forced, single]))
    assert reference.score([single]) is None


def test_sampled_generation_is_repeatable_and_differs_between_requests(bench: Bench) -> None:
    options = {"max_gen_toks": 16, "do_sample": True, "temperature": 1.5}
    requests = instances("generate_until", [("The", options), ("The", options)])
    first = bench.model(exact()).generate_until(requests)
    again = bench.model(exact()).generate_until(requests)
    assert first == again
    assert first[0] != first[1]


def test_what_cannot_fit_is_refused(bench: Bench) -> None:
    model = bench.model(exact(), max_length=8)
    with pytest.raises(UserError, match="256 new tokens, the context holds 8"):
        model.generate_until(instances("generate_until", [("The", {})]))
    with pytest.raises(UserError, match="at most 8 fit"):
        model.loglikelihood(instances("loglikelihood", [("a", "b" * 20)]), disable_tqdm=True)


def test_texts_end_before_the_earliest_stop() -> None:
    assert cut_at("one two three", ["three", "two"]) == "one "
    assert cut_at("one", ["two"]) == "one"
    assert cut_at("one", []) == "one"
