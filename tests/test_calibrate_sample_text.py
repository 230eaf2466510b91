"""The sample text: enough of it, prose, the same every time, and nothing held out is in both."""

from __future__ import annotations

from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.experiments import sample_text as module
from trimmoe.experiments.sample_text import sample_text


def test_there_is_enough_to_calibrate_and_the_rest_is_held_out() -> None:
    calibration = sample_text("calibration").split("\n\n")
    held_out = sample_text("held-out").split("\n\n")
    # English has more than three characters a token in any tokenizer of interest, and a window is
    # cut from a passage somewhat longer than it.
    assert sum(map(len, calibration)) > 2 * 6 * CalibrationSettings().tokens
    assert sum(map(len, held_out)) > 6 * 10_000
    assert not set(calibration) & set(held_out)
    assert len(set(calibration)) == len(calibration)


def test_it_is_prose_and_always_the_same() -> None:
    text = sample_text("held-out")
    module._paragraphs.cache_clear()
    module._documentation.cache_clear()
    assert text == sample_text("held-out")
    assert ">>>" not in text
    assert sum(letter.isalpha() or letter == " " for letter in text) > 0.9 * len(text)
