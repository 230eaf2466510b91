"""Text comes out whole: no broken characters, nothing past a stop string, however it is cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from trimmoe.api.detokenise import StopStrings, TextStream


def decode_bytes(tokens: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(tokens).decode(errors="replace")


def decode_fallback(tokens: Sequence[int]) -> str:
    """As tokenizers with byte fallback do: bytes that are no text are shown one by one."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return "".join(chr(one) if one < 128 else "\ufffd" for one in tokens)


def decode_words(tokens: Sequence[int]) -> str:
    """As sentence pieces do: every token brings a space, but for the first of a text."""
    return " ".join(f"w{one}" for one in tokens)


def streamed(tokens: Sequence[int], decode=decode_bytes) -> list[str]:
    stream = TextStream(decode)
    return [stream.push(token) for token in tokens]


def test_a_character_appears_when_its_last_byte_has_come() -> None:
    assert streamed("aé😀b".encode()) == ["a", "", "é", "", "", "", "😀", "b"]


def test_a_character_that_never_completes_never_appears() -> None:
    assert "".join(streamed("ok😀".encode()[:-1])) == "ok"


def test_bytes_that_are_no_text_do_not_hold_back_what_follows() -> None:
    assert "".join(streamed(b"\xff\xfe\xff\xff\xffabc")) == "\ufffd" * 5 + "abc"
    assert "".join(streamed(b"\xff" + "😀!".encode())) == "\ufffd😀!"


@given(st.text(max_size=40))
def test_text_comes_out_as_it_is_under_any_tokenizer_of_bytes(text: str) -> None:
    for decode in (decode_bytes, decode_fallback):
        pieces = streamed(text.encode(), decode)
        assert "".join(pieces).rstrip("\ufffd") == text.rstrip("\ufffd")
        for piece in pieces:
            assert len(piece) <= 1 + text.count("\ufffd")


@given(st.binary(max_size=60))
def test_any_bytes_come_out_but_for_an_unfinished_end(data: bytes) -> None:
    shown, all_text = "".join(streamed(data)), decode_bytes(data)
    assert all_text.startswith(shown)
    assert set(all_text[len(shown) :]) <= {"\ufffd"}


def test_endless_broken_bytes_are_shown_in_the_end() -> None:
    shown = "".join(streamed(b"\xff" * 200))
    assert 100 < len(shown) <= 200


@given(st.lists(st.integers(0, 50), max_size=30))
def test_spaces_between_pieces_survive(tokens: list[int]) -> None:
    assert "".join(streamed(tokens, decode_words)) == decode_words(tokens)


def stopped(chunks: Sequence[str], strings: Sequence[str]) -> tuple[str, bool]:
    stops = StopStrings(strings)
    out = ""
    for chunk in chunks:
        out += stops.push(chunk)
        if stops.stopped:
            return out, True
    return out + stops.flush(), False


def test_a_stop_string_cut_across_tokens_is_found_and_not_shown() -> None:
    assert stopped(["one\n", "\n", "two"], ["\n\n"]) == ("one", True)
    assert stopped(["a", "ab", "aa", "bc"], ["aabc"]) == ("aab", True)


def test_what_only_looked_like_a_stop_string_is_shown_after_all() -> None:
    stops = StopStrings(["END"])
    assert stops.push("the E") == "the "
    assert stops.push("N") == ""
    assert stops.push("ough") == "ENough"
    assert stops.push(" EN") == " "
    assert stops.flush() == "EN"


_LETTERS = st.text("ab", max_size=14)
_STRINGS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(_LETTERS, _STRINGS, st.lists(st.integers(0, 14), max_size=6))
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(
    text: str, strings: list[str], cuts: list[int]
) -> None:
    at = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    chunks = [text[a:b] for a, b in itertools.pairwise(at)]
    assert stopped(chunks, strings) == stopped(list(text), strings)


@given(_LETTERS, _STRINGS)
def test_text_ends_before_the_stop_string_that_is_complete_first(
    text: str, strings: list[str]
) -> None:
    out, found = stopped(list(text), strings)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in strings)]
    assert found == bool(ends)
    if not ends:
        assert out == text
        return
    longest = max((s for s in strings if text[: ends[0]].endswith(s)), key=len)
    assert out == text[: ends[0] - len(longest)]
