"""Calls whose arguments are no JSON: a whole call's text as its name and arguments."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

Whole = tuple[str, Mapping[str, Any]]
"""A call's name and arguments."""


def pythonic(body: str) -> list[Whole] | None:
    """`[f(a=1), g()]`, as Llama 3.2 and 4 write."""
    try:
        (told,) = ast.parse(body.strip(), mode="exec").body
        assert isinstance(told, ast.Expr)
        assert isinstance(told.value, ast.List | ast.Call)
        calls = told.value.elts if isinstance(told.value, ast.List) else [told.value]
        return [_python_call(each) for each in calls]
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        return None


def _python_call(call: ast.expr) -> Whole:
    assert isinstance(call, ast.Call)
    assert not call.args
    assert all(each.arg for each in call.keywords)
    return ast.unparse(call.func), {str(k.arg): _literal(k.value) for k in call.keywords}


def _literal(value: ast.expr) -> Any:
    """A value of Python, or of JSON."""
    constants = {"true": True, "false": False, "null": None}
    if isinstance(value, ast.Name) and value.id in constants:
        return constants[value.id]
    if isinstance(value, ast.List):
        return [_literal(each) for each in value.elts]
    if isinstance(value, ast.Dict):
        assert all(key is not None for key in value.keys)
        return {
            str(ast.literal_eval(key)): _literal(each)
            for key, each in zip(value.keys, value.values, strict=True)
            if key is not None
        }
    found = ast.literal_eval(value)
    assert found is None or isinstance(found, str | int | float | bool)
    return found


_GLM = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_CODER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_CODER_NAME = re.compile(r"\s*<function=([^>\s]+)>")


def glm(body: str) -> list[Whole] | None:
    """A name, then keys and values in tags of their own."""
    name = body.split("<arg_key>", 1)[0].strip()
    if not name or any(one in name for one in " \n<{"):
        return None
    return [(name, {key.strip(): _told(value) for key, value in _GLM.findall(body)})]


def coder(body: str) -> list[Whole] | None:
    """`<function=f>` and tags for its parameters, as Qwen3-Coder writes."""
    named = _CODER_NAME.match(body)
    if named is None:
        return None
    return [(named[1], {key.strip(): _told(value) for key, value in _CODER.findall(body)})]


def _told(value: str) -> Any:
    """What is JSON as that, all else as text."""
    try:
        return json.loads(value)
    except ValueError:
        return value
