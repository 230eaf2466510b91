"""Named tuples of arrays that compiled functions hand on as one pointer.

Numba passes a tuple field by field, and an array is seven fields: a call that hands on the whole
state of a simulation has some 700 arguments, and compiling the calls takes two minutes on a slow
machine. What `refer` gives has the same attributes, read through a pointer.

    @njit
    def entered_from_python(state):
        state = refer(state)
        ...  # and whatever is called with it

A reference is valid within the function that made it, and the fields cannot change meanwhile; what
is in their arrays may. Only for functions that count no references to arrays (`heap.njit`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    def refer(fields: Any) -> Any: ...

else:
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.core.imputils import impl_ret_borrowed
    from numba.core.typing.templates import AttributeTemplate
    from numba.extending import (
        infer_getattr,
        intrinsic,
        lower_getattr_generic,
        models,
        register_model,
    )

    class Reference(types.Type):
        """The type of a pointer to a named tuple."""

        def __init__(self, to: types.BaseNamedTuple) -> None:
            self.to = to
            super().__init__(name=f"Reference({to})")

    @register_model(Reference)
    class _Pointer(models.PrimitiveModel):
        def __init__(self, manager: Any, kind: Reference) -> None:
            super().__init__(manager, kind, manager[kind.to].get_value_type().as_pointer())

    @infer_getattr
    class _Fields(AttributeTemplate):
        key = Reference

        def generic_resolve(self, kind: Reference, name: str) -> types.Type | None:
            fields = kind.to.fields
            return kind.to[fields.index(name)] if name in fields else None

    @lower_getattr_generic(Reference)
    def _load(context: Any, builder: Any, kind: Reference, pointer: Any, name: str) -> Any:
        index = kind.to.fields.index(name)
        loaded = builder.load(cgutils.gep_inbounds(builder, pointer, 0, index))
        # So that it is not read anew after whatever else is written.
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return impl_ret_borrowed(context, builder, kind.to[index], loaded)

    @intrinsic
    def refer(_typing: Any, fields: types.BaseNamedTuple) -> Any:
        """A reference to the fields of a named tuple."""

        def keep(_context: Any, builder: Any, _signature: Any, given: Any) -> ir.Value:
            return cgutils.alloca_once_value(builder, given[0])

        return Reference(fields)(fields), keep
