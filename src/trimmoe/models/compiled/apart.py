"""Compiled functions that are compiled once, whoever calls them.

The compiler puts what a function calls into it and goes through all of it again, at every level; a
whole step of decoding took it minutes. A function that is `apart` is called through a cell that
holds its address instead. Who calls it names the cell alone, so that it is found again in another
process; `prepare` has the functions compiled, or read from where they are kept, and fills the
cells.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from llvmlite import binding, ir
from numba import cfunc, get_num_threads, types
from numba.extending import intrinsic

from trimmoe.models.compiled import one_at_a_time


@ctypes.CFUNCTYPE(None)
def _unprepared() -> None:
    """What cells point to at first: better the end than numbers that nobody computed."""
    print("a compiled function was called before it was prepared", file=sys.stderr)
    os.abort()


_UNPREPARED = ctypes.cast(_unprepared, ctypes.c_void_p).value


@dataclass(kw_only=True, slots=True)
class _Part:
    """A function and where others find its address."""

    function: Callable[..., None]
    signature: Any
    cell: Any
    compiled: Any = None


_PARTS: dict[str, _Part] = {}


def apart(*arguments: Any) -> Callable[[Callable[..., None]], Any]:
    """Decorates a function of arguments of these types of numba's that gives nothing. What takes
    its place is called by compiled functions alone, once its module is prepared."""
    signature = types.void(*arguments)

    def decorate(function: Callable[..., None]) -> Any:
        name = f"{function.__module__}.{function.__qualname__}"
        cell = ctypes.c_int64(_UNPREPARED or 0)
        binding.add_symbol(name, ctypes.addressof(cell))
        _PARTS[name] = _Part(function=function, signature=signature, cell=cell)
        return _caller(name, function, signature)

    return decorate


def prepare(*modules: ModuleType) -> None:
    """Compile what is `apart` in these modules, or read it from where it is kept."""
    wanted = {module.__name__ for module in modules}
    lacking = [
        part
        for part in _PARTS.values()
        if part.compiled is None and part.function.__module__ in wanted
    ]
    if not lacking:
        return
    # What threads need is named in what is kept of functions, and is not there before. Asked for
    # it, the compiler's library has this thread use as many as there are cores, in torch too.
    threads = torch.get_num_threads()
    get_num_threads()
    torch.set_num_threads(threads)
    options: dict[str, Any] = {"cache": True, "error_model": "numpy"}
    with one_at_a_time():
        for part in lacking:
            part.compiled = cfunc(part.signature, **options)(part.function)
            part.cell.value = part.compiled.address


def _caller(name: str, function: Callable[..., None], declared: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = [context.get_value_type(each) for each in signature.args]
        kind = ir.FunctionType(ir.VoidType(), kinds)
        address = builder.load(_cell(builder.module, name))
        builder.call(builder.inttoptr(address, kind.as_pointer()), values)
        return context.get_dummy_value()

    def typed(typingctx: Any, *given: Any) -> Any:
        return declared, generate

    own = inspect.signature(function).parameters.values()
    first = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    whole = inspect.Signature([first, *own])
    typed.__signature__ = whole  # pyright: ignore[reportFunctionMemberAccess]
    typed.__name__, typed.__doc__ = function.__name__, function.__doc__
    return intrinsic(typed)


def _cell(module: Any, name: str) -> Any:
    """The variable of another's that a module of the compiler's knows by name."""
    if name not in module.globals:
        ir.GlobalVariable(module, ir.IntType(64), name).linkage = "external"
    return module.globals[name]
