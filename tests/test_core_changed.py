"""Copies with some fields changed: what the standard library's `replace` gives."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimmoe.core.changed import changed


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    name: str
    size: int = 3
    weight: float = 0.5


@given(st.dictionaries(st.sampled_from(["name", "size", "weight"]), st.integers()))
def test_it_is_what_the_standard_library_gives(changes: dict[str, int]) -> None:
    thing = Thing(name="a")
    made = changed(thing, **changes)
    assert made == replace(thing, **changes)  # type: ignore[arg-type]
    assert thing == Thing(name="a")


def test_the_copy_is_frozen_too() -> None:
    with pytest.raises(FrozenInstanceError):
        changed(Thing(name="a"), size=4).size = 5  # type: ignore[misc]


def test_a_field_that_there_is_not_is_refused() -> None:
    with pytest.raises(KeyError):
        changed(Thing(name="a"), colour="red")
