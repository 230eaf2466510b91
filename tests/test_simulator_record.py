"""Traces of a real model, and the commands that record and play them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_heads import random_head
from tiny import EXPERTS, LAYERS, TOP_K, write_tiny_checkpoint
from trimmoe import cli
from trimmoe.calibrate.run import calibrate
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.text import token_windows
from trimmoe.calibrate.trace import TraceSettings, asked_of, record_trace, trace_windows
from trimmoe.calibrate.windows import Windows
from trimmoe.core.errors import UserError
from trimmoe.core.events import Executed, Routed
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import MOST_DRAFTED
from trimmoe.core.trace import Trace, load_trace
from trimmoe.experiments.method_engines import make_engine
from trimmoe.models.base import MoEView
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.draft_chains import Chain
from trimmoe.models.draft_head import DraftHead
from trimmoe.models.exact import full_depth, greedy
from trimmoe.models.load import load_tokenizer, open_model
from trimmoe.placement.make import default, make_plan
from trimmoe.policy.presets import exact, speculative
from trimmoe.runtime.guesser import Guesser
from trimmoe.runtime.local import LocalDriver

LENGTH = 24


@dataclass(frozen=True, kw_only=True)
class Made:
    """A tiny model with all that is made of it, in files too."""

    folder: Path
    view: MoEView
    tokenizer: object
    texts: list[str]
    profile: Profile
    plan: Plan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    from trimmoe.core.cluster_file import load_cluster

    folder = tmp_path_factory.mktemp("recorded")
    (folder / "model").mkdir()
    path = write_tiny_checkpoint(folder / "model")
    view, tokenizer = open_model(path, hashed=True), load_tokenizer(path)
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), size=5)) for _ in range(40)]
    texts = [" ".join(rng.choice(words, size=600)) for _ in range(3)]
    (folder / "text.txt").write_text(texts[0])
    settings = CalibrationSettings(tokens=1600, window=32, seed=0)
    profile = calibrate(view, tokenizer, texts, settings, progress=False)
    cluster = load_cluster(Path(__file__).parents[1] / "clusters" / "home3.yaml")
    plan = make_plan(profile, view.spec, cluster, default(), cluster_hash="c")
    profile.save(folder / "profile.trim")
    plan.save(folder / "plan.trim")
    return Made(
        folder=folder, view=view, tokenizer=tokenizer, texts=texts, profile=profile, plan=plan
    )


@pytest.fixture(scope="module")
def trace(made: Made) -> Trace:
    settings = TraceSettings(tokens=5 * LENGTH, length=LENGTH, seed=1)
    return record_trace(made.view, made.tokenizer, made.texts, made.profile, settings)


def test_a_trace_has_the_shape_and_the_hashes_of_what_made_it(made: Made, trace: Trace) -> None:
    assert (trace.sequence_count, trace.length) == (5, LENGTH)
    assert trace.experts.shape == (5 * LENGTH, LAYERS, TOP_K)
    assert trace.probabilities is not None
    assert trace.probabilities.shape == (5 * LENGTH, LAYERS, EXPERTS)
    assert trace.header.input_hashes["model"] == made.view.spec.model_hash
    trace.require_profile(made.profile)
    with pytest.raises(UserError, match="trimmoe record"):
        trace.require_profile(replace(made.profile, theta=made.profile.theta + 0.1))


def test_a_trace_is_what_a_driver_tells_the_engine(made: Made, trace: Trace) -> None:
    """Decoding the same tokens exactly, one by one, the runtime's events say the same."""
    ids = token_windows(made.texts, made.tokenizer, tokens=5 * LENGTH, window=LENGTH, seed=1)
    engine = make_engine(made.plan, made.profile, made.view.spec, exact())
    driver = LocalDriver(made.view, made.profile, engine, slots=1)
    sequence = ids[2].tolist()
    driver.log = []
    driver.open(7, sequence[:4], access=0, budget=0.0, confidence=2.0)
    for token in sequence[4:]:
        driver.decode({7: token})
    events = [event for event, _ in driver.log]
    routed = [event for event in events if isinstance(event, Routed)]
    executed = [event for event in events if isinstance(event, Executed)]
    mine = slice(2 * LENGTH + 4, 3 * LENGTH)
    shape = (LENGTH - 4, LAYERS)

    def told(those, name: str) -> np.ndarray:
        return np.stack([getattr(event, name)[0] for event in those]).reshape(*shape, -1)

    np.testing.assert_array_equal(told(routed, "experts"), trace.experts[mine])
    np.testing.assert_allclose(told(routed, "masses"), trace.masses[mine], atol=1e-5)
    np.testing.assert_allclose(
        told(routed, "importance")[..., 0], trace.importance[mine], atol=1e-5
    )
    np.testing.assert_allclose(
        told(executed, "confidence")[..., 0], trace.confidence[mine], atol=1e-5
    )
    # Cut points of scores: rounding may move a token that lies on one.
    for those, name in ((routed, "steadiness"), (executed, "exit_at")):
        same = told(those, name)[..., 0] == getattr(trace, name)[mine]
        assert same.mean() > 0.97


def test_a_trace_knows_what_transformers_would_predict_after_each_layer(
    made: Made, trace: Trace
) -> None:
    """Final norm and head on every layer's states, which transformers gives out on demand."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made.folder / "model", dtype=torch.float32)
    ids = token_windows(made.texts, made.tokenizer, tokens=5 * LENGTH, window=LENGTH, seed=1)
    with torch.inference_mode():
        said = model(torch.from_numpy(ids), output_hidden_states=True)
        # The last of these is normed already.
        early = [model.lm_head(model.model.norm(each)) for each in said.hidden_states[1:-1]]
    final = said.logits.argmax(-1)
    wrong = torch.stack([each.argmax(-1) != final for each in early], dim=-1).flatten(0, 1)
    assert trace.wrong is not None
    np.testing.assert_array_equal(trace.wrong[:, :-1], wrong.numpy())
    assert not trace.wrong[:, -1].any()
    assert 0 < trace.wrong[:, :-1].sum() < trace.wrong[:, :-1].size


def test_a_trace_knows_what_each_server_of_a_plan_would_guess(made: Made, trace: Trace) -> None:
    """As a driver has them guess whose streams are those of the trace, token by token."""
    assert trace.home_wrong is None
    hosts = made.plan.hosts.copy()
    hosts[0] = True  # A server with everything is always right.
    hosts[1] = False
    settings = TraceSettings(tokens=5 * LENGTH, length=LENGTH, seed=1)
    guessed = record_trace(
        made.view, made.tokenizer, made.texts, made.profile, settings, hosts=hosts
    )
    assert guessed.home_wrong is not None
    assert guessed.home_confidence is not None
    assert guessed.home_wrong.shape == (5 * LENGTH, len(hosts))
    assert guessed.home_wrong[:, 0].mean() < 0.02  # Rounding decides between equals.
    assert guessed.home_wrong[:, 1].mean() > 0.1
    assert guessed.home_near is not None
    assert not (guessed.home_near & ~guessed.home_wrong).any(), "what is right is not nearly right"
    ids = token_windows(made.texts, made.tokenizer, tokens=5 * LENGTH, window=LENGTH, seed=1)
    engine = make_engine(made.plan, made.profile, made.view.spec, speculative())
    guesser = Guesser(made.view, replace(engine, hosts=hosts), slots=1)
    for server in range(len(hosts)):
        guesser.open(server, slot=0, access=server)
        (said,) = guesser.guess({server: ids[2].tolist()}).values()
        mine = slice(2 * LENGTH, 3 * LENGTH)
        sure = [one[0].confidence for one in said]
        np.testing.assert_allclose(sure, guessed.home_confidence[mine, server], atol=1e-3)
    arrays = {name: getattr(guessed, name) for name in trace.columns}
    for name, before in ((name, getattr(trace, name)) for name in trace.columns):
        np.testing.assert_array_equal(arrays[name], before)


def test_a_trace_of_answers_is_one_of_what_transformers_generates(made: Made) -> None:
    from transformers import AutoModelForCausalLM

    settings = TraceSettings(tokens=3 * LENGTH, length=LENGTH, answers=8, seed=1)
    trace = record_trace(made.view, made.tokenizer, made.texts, made.profile, settings)
    ids = token_windows(made.texts, made.tokenizer, tokens=3 * LENGTH, window=LENGTH, seed=1)
    prompts = torch.from_numpy(ids[:3, :-8])
    folder = made.folder / "model"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = model.generate(prompts, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    told = trace_windows(made.view, made.profile, Windows(ids=said.numpy()), trace.header)
    np.testing.assert_array_equal(trace.experts, told.experts)
    assert trace.answered.reshape(3, LENGTH)[:, -8:].all()
    assert trace.answered.sum() == 3 * 8
    asked = asked_of(trace, made.tokenizer, made.texts)
    np.testing.assert_array_equal(asked, prompts.numpy())
    assert asked_of(trace, made.tokenizer, [*made.texts, "Others."]) is None
    text = record_trace(
        made.view, made.tokenizer, made.texts, made.profile, replace(settings, answers=0)
    )
    assert asked_of(text, made.tokenizer, made.texts) is None
    long = replace(settings, answers=LENGTH)
    with pytest.raises(UserError, match="longer sequences"):
        record_trace(made.view, made.tokenizer, made.texts, made.profile, long)


def test_a_trace_knows_what_a_draft_head_names(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it names it for each sequence by itself, and right as far as full depth says the same."""
    view = made.view
    assert isinstance(view, CompiledView)
    head = DraftHead(
        random_head(view.spec.hidden_size, view.spec.vocab_size), view.head_rows, view.token_rows
    )
    settings = TraceSettings(tokens=3 * LENGTH, length=LENGTH, answers=8, seed=1)
    plain = record_trace(view, made.tokenizer, made.texts, made.profile, settings)
    assert plain.drafted_chance is plain.drafted_wrong is None
    monkeypatch.setattr(view, "draft_head", head)
    trace = record_trace(view, made.tokenizer, made.texts, made.profile, settings)
    text = record_trace(
        view, made.tokenizer, made.texts, made.profile, replace(settings, answers=0)
    )
    assert text.drafted_chance is text.drafted_wrong is None, "nobody answers here"
    assert trace.drafted_chance is not None
    assert trace.drafted_wrong is not None
    ids = token_windows(made.texts, made.tokenizer, tokens=3 * LENGTH, window=LENGTH, seed=1)
    tokens = ids[1, :-8].tolist()
    tokens += greedy(view, [tokens], 8)[0]
    cache = view.new_cache(slots=1)
    batch = view.batch(cache, [cache.alloc()], [range(LENGTH)])
    whole = full_depth(view, view.embed(batch.pad([tokens]), batch), batch, cache)
    states, follows = view.normed_last(whole).numpy(), view.logits(whole).argmax(-1).tolist()
    for at in (1, 5, LENGTH - 8, LENGTH - 1):
        memory = head.begin()
        head.read(memory, 0, states[:at], tokens[:at])
        chain = Chain(memory=memory, position=at, token=tokens[at], most=MOST_DRAFTED, likely=0.0)
        head.draft_all([chain])
        named, row = min(MOST_DRAFTED, LENGTH - at), LENGTH + at
        np.testing.assert_allclose(
            trace.drafted_chance[row, :named], chain.chances[:named], rtol=0.01, atol=1e-4
        )
        same = [chain.drafted[: more + 1] == follows[at : at + more + 1] for more in range(named)]
        assert (~trace.drafted_wrong[row, :named]).tolist() == same
        assert trace.drafted_wrong[row, named:].all()
        assert not trace.drafted_chance[row, named:].any()
    assert not trace.drafted_chance[::LENGTH].any(), "nothing is known before the first token"


def test_recording_again_gives_the_same_trace(made: Made, trace: Trace) -> None:
    settings = TraceSettings(tokens=5 * LENGTH, length=LENGTH, seed=1)
    torch.manual_seed(99)
    again = record_trace(made.view, made.tokenizer, made.texts, made.profile, settings)
    assert again.hash == trace.hash


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["trimmoe", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def test_record_and_simulate_as_commands(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, recorded, figures = made.folder, tmp_path / "trace.trim", tmp_path / "figures.json"
    files = ["--profile", folder / "profile.trim"]
    code = command(
        monkeypatch, "record", folder / "model", "--text", folder / "text.txt", *files,
        "-o", recorded, "--tokens", 96, "--length", 24,
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err
    trace = load_trace(recorded)
    assert trace.token_count == 96
    code = command(
        monkeypatch, "simulate", folder / "plan.trim", *files, "--trace", recorded,
        "--model", folder / "model", "--method", "exact", "--method", "trimmoe", "--rate", 20,
        "--prompt-tokens", 4, "--output-tokens", 5, "--warm-up", 0.5, "--duration", 2,
        "--seeds", 2, "--seed", 3, "--json", figures,
    )  # fmt: skip
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "TrimMoE" in shown.out
    content = json.loads(figures.read_text())
    assert content["seeds"] == [3, 4]
    assert content["trimmoe_version"]
    assert content["settings"]["load"]["rate_per_s"] == 20
    assert content["input_hashes"] == {
        "model": made.view.spec.model_hash,
        "profile": made.profile.hash,
        "plan": made.plan.hash,
        "trace": trace.hash,
    }
    rows = {row["method"]: row for row in content["methods"]}
    assert rows.keys() == {"exact", "trimmoe"}
    for row in rows.values():
        assert row["accounting"] == "pinned"
        assert sum(row["kinds"].values()) == pytest.approx(1.0)
        assert row["figures"]["token_ms"]["mean"] > 0
        assert row["figures"]["token_ms"]["low_95"] <= row["figures"]["token_ms"]["mean"]
    assert rows["exact"]["figures"]["budget_spent_per_token"]["mean"] == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rate", 1, "--concurrency", 2], "either a rate"),
        (["--rate", -1], "above 0"),
        (["--method", "magic"], "magic"),
        (["--duration", 0], "duration"),
        (["--json", "no/such/folder.json"], "does not exist"),
    ],
)
def test_a_users_mistakes_are_one_sentence(
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list,
    says: str,
) -> None:
    code = command(
        monkeypatch, "simulate", made.folder / "plan.trim", "--profile",
        made.folder / "profile.trim", "--trace", made.folder / "none.trim", *options,
    )  # fmt: skip
    shown = capsys.readouterr().err
    assert code == 2
    assert says in shown
    assert "Traceback" not in shown
