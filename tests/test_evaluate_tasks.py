"""Tasks over local files are the harness' own, scored under every method beside the agreement."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval.api.registry import get_model
from rich.console import Console
from typer.testing import CliRunner

from evaluating import Bench, make_bench
from trimmoe.cli import app
from trimmoe.core.choice import Choice
from trimmoe.core.errors import UserError
from trimmoe.evaluate.harness import DriverLM
from trimmoe.evaluate.local_data import local_data
from trimmoe.evaluate.optional import require_harness
from trimmoe.evaluate.squad import process_results
from trimmoe.evaluate.tasks import local_task, prepare, reference_answers
from trimmoe.experiments import lm_eval_model
from trimmoe.experiments.compare import CompareSettings, policies_of
from trimmoe.experiments.evaluate import (
    TaskResult,
    evaluate_tasks,
    evaluation_json,
    planned_runs,
    print_evaluation,
)
from trimmoe.experiments.evaluate_settings import EvaluateSettings
from trimmoe.experiments.methods import METHODS, UNLIMITED
from trimmoe.experiments.subject import Subject, make_run

WIKITEXT = (
    " \n = Lobster = \n \n The lobster , a <unk> , is blue . It is 0 @.@ 5 m long . \n \n"
    " = = Habitat = = \n \n It lives in the sea . \n \n = Crab = \n \n A crab walks sideways . \n"
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The three tasks as their makers publish them, a few documents each."""
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "wiki.test.tokens").write_text(WIKITEXT)
    (tmp_path / "wikitext-2" / "wiki.train.tokens").write_text(" = Never read = \n\n x \n")
    questions = [
        {"id": str(n), "question": f" What is {n}? ", "answers": [{"text": t} for t in texts]}
        for n, texts in enumerate([["the Blue lobster"], ["red", "a crab"], []])
    ]
    squad = {"data": [{"title": "Sea", "paragraphs": [{"context": "It is.", "qas": questions}]}]}
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "dev-v1.1.json").write_text(json.dumps(squad))
    problems = [
        {
            "question": f"How many are {n} and {n}?",
            "answer": f"{n} and {n} is {2 * n}.\n#### {2 * n}",
        }
        for n in range(1, 41)
    ]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text("\n".join(json.dumps(p) for p in problems))
    return tmp_path


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("tiny"))


def task(name: str, folder: Path, *, limit: int | None = None, num_fewshot: int = 0) -> Any:
    made = local_task(local_data(name, folder, limit=limit, seed=0))
    prepare(made, num_fewshot=num_fewshot, max_gen_toks=4, seed=0)
    made.build_all_requests(limit=limit, rank=0, world_size=1)
    return made


def test_wikitext_is_its_articles_detokenised_and_counted_in_original_words(data: Path) -> None:
    made = task("wikitext", data)
    lobster, crab = (instance.args[0] for instance in made.instances)
    assert "The lobster, a <unk>, is blue. It is 0.5 m long." in lobster
    assert "Habitat" in lobster
    assert "A crab walks sideways." in crab
    page = made.instances[1].doc["page"]
    (loglikelihood, words) = made.process_results({"page": page}, [-7.0])["word_perplexity"]
    assert (loglikelihood, words) == (-7.0, len(page.split()) + 2)  # its ends count as words


def test_squad_answers_are_compared_as_the_official_script_does(data: Path) -> None:
    made = task("squad", data)
    assert len(made.instances) == 2  # the question without an answer is left out
    prompt, options = made.instances[0].args
    assert prompt == "Title: Sea\n\nBackground: It is.\n\nQuestion: What is 0?\n\nAnswer:"
    assert options["until"] == ["\n"]
    assert reference_answers(made)[0] == (prompt, " the Blue lobster")
    doc = {"answers": {"text": ["the Blue lobster", "crab"]}}
    assert process_results(doc, ["  A blue   LOBSTER."]) == {"f1": 1.0, "exact_match": 1.0}
    half = process_results(doc, ["red lobster in the water"])
    assert half["exact_match"] == 0.0
    assert half["f1"] == pytest.approx(2 * 1 / (4 + 2))
    assert process_results(doc, ["whale"]) == {"f1": 0.0, "exact_match": 0.0}


def test_gsm8k_is_the_harness_own_but_for_its_data(data: Path) -> None:
    import lm_eval.tasks

    made = task("gsm8k", data, num_fewshot=3)
    folder = Path(lm_eval.tasks.__path__[0])
    own = yaml.safe_load((folder / "gsm8k" / "gsm8k.yaml").read_text())
    for key in ("doc_to_text", "doc_to_target", "filter_list"):
        assert made.config.to_dict()[key] == own[key], key
    for instance in made.instances:
        prompt, asked = instance.args[0], instance.doc["question"]
        assert prompt.count("Question: ") == 4
        assert prompt.count(asked) == 1  # the question asked is never among the examples
        assert prompt.endswith(f"Question: {asked}\nAnswer:")


def test_a_draw_is_repeatable_and_its_examples_are_other_problems(data: Path) -> None:
    drawn = local_data("gsm8k", data, limit=5, seed=1)
    assert drawn == local_data("gsm8k", data, limit=5, seed=1)
    assert drawn.documents != local_data("gsm8k", data, limit=5, seed=2).documents
    assert len(drawn.documents) == 5
    assert len(drawn.shots) == 35
    asked = {document["question"] for document in drawn.documents}
    assert not asked & {shot["question"] for shot in drawn.shots}


def test_examples_come_from_the_training_split_where_there_is_one(data: Path) -> None:
    problem = {"question": "Trained?", "answer": "Yes.\n#### 1"}
    lines = "\n".join(json.dumps(problem | {"question": f"Trained {n}?"}) for n in range(40))
    (data / "gsm8k" / "train.jsonl").write_text(lines)
    found = local_data("gsm8k", data, limit=None, seed=0)
    assert len(found.documents) == 40
    assert all(shot["question"].startswith("Trained") for shot in found.shots)
    assert set(found.hashes) == {"test.jsonl", "train.jsonl"}


@pytest.mark.parametrize(
    ("name", "file", "content", "complaint"),
    [
        ("squad", "squad/dev-v1.1.json", "{}", "is not a SQuAD file"),
        ("gsm8k", "gsm8k/test.jsonl", "[1]", "is not a GSM8K file"),
        ("wikitext", "wikitext-2/wiki.test.tokens", "no heading", "holds no documents"),
        ("hellaswag", None, "", "no local form of the task `hellaswag`"),
    ],
)
def test_bad_data_is_refused_in_a_sentence(
    data: Path, name: str, file: str | None, content: str, complaint: str
) -> None:
    if file is not None:
        (data / file).write_text(content)
    with pytest.raises(UserError, match=complaint):
        local_data(name, data, limit=None, seed=0)


def test_a_folder_without_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no data for squad"):
        local_data("squad", tmp_path, limit=None, seed=0)


def test_without_the_harness_a_sentence_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'trimmoe\[evaluate\]'"):
        require_harness()


def subject(bench: Bench) -> Subject:
    return Subject(
        view=bench.view, tokenizer=bench.tokenizer, profile=bench.profile, plan=bench.plan
    )


def test_every_task_runs_under_every_method_and_exact_agrees_with_itself(
    bench: Bench, data: Path
) -> None:
    tasks = {name: task(name, data) for name in ("wikitext", "squad", "gsm8k")}
    settings = EvaluateSettings(
        methods=("trimmoe",), budgets=(0.5,), limit=2, num_fewshot=0, max_gen_toks=4,
        max_length=96, at_once=3,
    )  # fmt: skip
    results = list(evaluate_tasks(subject(bench), tasks, settings))
    content = evaluation_json(settings, subject(bench), results, {"squad/dev.json": "0"})
    assert [(row["task"], row["method"]) for row in content["results"]] == [
        (name, method) for name in tasks for method in ("exact", "trimmoe")
    ]
    for row in content["results"]:
        told = row["reference_answers"]
        assert row["documents"] == 2
        assert told["tokens"] > 0
        if row["method"] == "exact":
            assert told["agreement"] == 1.0
            assert told["perplexity"] == pytest.approx(told["exact_perplexity"], rel=1e-4)
        else:
            assert 0 <= told["budget_spent_per_token"] <= told["budget_per_token"]
    by_task = {row["task"]: row for row in content["results"] if row["method"] == "exact"}
    assert by_task["wikitext"]["retention"] == pytest.approx(1.0)
    assert {"f1,none", "exact_match,none"} <= set(by_task["squad"]["metrics"])
    assert by_task["gsm8k"]["score_name"] == "exact_match,strict-match"
    assert by_task["gsm8k"]["generated"]["tokens"] == 2 * 3  # of four, the prompt makes the first
    assert content["input_hashes"]["plan"] == bench.plan.hash
    assert json.loads(json.dumps(content, default=str))["seed"] == 0
    console = Console(width=100, record=True, file=io.StringIO())
    print_evaluation(console, content)
    assert "against exact nearest" in console.export_text()


def test_word_perplexity_is_the_exponential_of_the_mean_loss_per_original_word(
    bench: Bench, data: Path
) -> None:
    settings = EvaluateSettings(methods=(), max_length=64, at_once=2)
    (result,) = evaluate_tasks(subject(bench), {"wikitext": task("wikitext", data)}, settings)
    exact = make_run(Choice(method="exact", budget=0.0, confidence=2.0))
    model = bench.model(exact.policy, max_length=64)
    made = task("wikitext", data)
    totals = model.loglikelihood_rolling(made.instances)
    words = sum(len(instance.doc["page"].split()) + 2 for instance in made.instances)
    assert result.metrics["word_perplexity,none"] == pytest.approx(math.exp(-sum(totals) / words))


def test_exact_execution_always_runs_first_and_nothing_twice() -> None:
    settings = EvaluateSettings(methods=("trimmoe", "exact", "trimmoe"), budgets=(0.01, 0.02))
    runs = planned_runs(settings)
    assert [(run.method, run.policy.budget) for run in runs] == [
        ("exact", 0.0),
        ("trimmoe", 0.01),
        ("trimmoe", 0.02),
    ]


def test_what_looks_at_no_budget_runs_once_and_what_keeps_to_one_at_every_budget() -> None:
    names = ("exact", "moe2", "moe2-matched", "paper")
    expected = [("exact", 0.0), ("moe2", UNLIMITED)]
    expected += [(name, budget) for name in names[2:] for budget in (0.01, 0.02)]
    runs = planned_runs(EvaluateSettings(methods=names, budgets=(0.01, 0.02)))
    assert [(run.method, run.policy.budget) for run in runs] == expected
    compared = policies_of(CompareSettings(methods=names, budgets=(0.01, 0.02)))
    assert [(name, policy.budget) for name, policy in compared] == expected


def test_a_title_has_the_budget_if_there_is_one() -> None:
    for name, budget, title in (
        ("exact", 0.0, "exact nearest"),
        ("moe2", UNLIMITED, "MoE^2 (adapted)"),
        ("moe2-matched", 0.015, "MoE^2 (adapted), within the budget 0.015"),
    ):
        assert METHODS[name].titled(budget) == title
    assert make_run(Choice(method="trimmoe", budget=0.01)).title == "TrimMoE 0.01"


def test_retention_turns_round_where_less_is_better() -> None:
    def result(value: float, *, higher: bool) -> TaskResult:
        return TaskResult(
            task="t", run=make_run(Choice(method="exact", budget=0.0, confidence=1.0)), documents=1,
            metrics={"m,none": value}, higher_is_better={"m": higher}, agreement=None,
            exact_nll=None, generated=None,
        )  # fmt: skip

    assert result(8.0, higher=True).retention(result(10.0, higher=True)) == pytest.approx(0.8)
    assert result(12.5, higher=False).retention(result(10.0, higher=False)) == pytest.approx(0.8)
    assert result(1.0, higher=True).retention(result(0.0, higher=True)) is None


@pytest.fixture
def artifacts(bench: Bench, tmp_path: Path) -> tuple[Path, Path]:
    """Profile and plan on disk, fitting the model and each other."""
    profile, plan = tmp_path / "profile.trim", tmp_path / "plan.trim"
    bench.profile.save(profile)
    hashes = bench.plan.header.input_hashes | {"profile": bench.profile.hash}
    replace(bench.plan, header=replace(bench.plan.header, input_hashes=hashes)).save(plan)
    return profile, plan


def test_the_harness_finds_the_model_by_name_with_arguments(
    bench: Bench, artifacts: tuple[Path, Path]
) -> None:
    profile, plan = artifacts
    assert get_model("trimmoe") is lm_eval_model.TrimMoELM
    model = lm_eval_model.TrimMoELM.create_from_arg_string(
        f"model={bench.folder},profile={profile},plan={plan},method=trimmoe,budget=0.02,"
        "max_length=64",
        {"batch_size": "auto:4", "max_batch_size": None, "device": "cpu"},
    )
    assert isinstance(model, DriverLM)
    assert model.serving.budget == 0.02
    assert model.driver.engine.settings.name == "trimmoe"
    assert (model.batch_size, model.max_length) == (16, 64)


def test_the_command_writes_a_table_and_the_figures(
    bench: Bench, data: Path, artifacts: tuple[Path, Path], tmp_path: Path
) -> None:
    profile, plan = artifacts
    done = CliRunner().invoke(
        app,
        [
            "evaluate", "--tasks", "squad", "--data", str(data), "--model", str(bench.folder),
            "--profile", str(profile), "--plan", str(plan), "--limit", "1", "--budget", "0.05",
            "--max-gen-toks", "3", "--json", str(tmp_path / "out.json"),
        ],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "TrimMoE 0.05" in done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["settings"]["limit"] == 1
    assert len(content["input_hashes"]["squad/dev-v1.1.json"]) == 64
