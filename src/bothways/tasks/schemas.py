"""The schemas of predictions, derived from their annotations: JSON Schema and Arrow types.

| annotation | JSON Schema | Arrow |
|---|---|---|
| `str`, `int`, `float` | string, integer from 0, number | string, int64, double |
| `Literal["a", "b"]` | an enum | string |
| X or None | also null | the type of X |
| `tuple[X, ...]` | an array | a list |
| `tuple[X, Y]`, a `NamedTuple` | an array of this length | a list; a struct |
| `Mapping[str, X]` | an object | a map |
| a dataclass | an object | a struct |
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from bothways.tasks.base import Task
from bothways.tasks.predictions import written_fields

Schema = dict[str, Any]
_PLAIN: dict[Any, tuple[Schema, str]] = {
    str: ({"type": "string"}, "string"),
    int: ({"type": "integer", "minimum": 0}, "int64"),
    float: ({"type": "number"}, "double"),
}
"""JSON Schema and Arrow alias of plain types; whole numbers are counts and indices."""
_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def prediction_type(task: Task[Any, Any] | type[Task[Any, Any]]) -> type:
    """Return the type of a task's predictions: the one that its model's `decode` returns."""
    result: type = typing.get_type_hints(task.model_class.decode)["return"]
    return result


def json_schema(annotation: Any) -> Schema:
    """Return the JSON Schema of the values of a type, as `predictions.plain` writes them."""
    if annotation in _PLAIN:
        return dict(_PLAIN[annotation][0])
    if hasattr(annotation, "__dataclass_fields__"):
        # Attributes are described by the docstring of the class, properties by their own.
        section = inspect.cleandoc(annotation.__doc__ or "").partition("\nAttributes:\n")[2]
        texts = dict(_ATTRIBUTE.findall(section))
        members = vars(annotation).items()
        texts |= {name: value.__doc__ for name, value in members if isinstance(value, property)}
        about = {name: {"description": re.sub(r"\s+", " ", text)} for name, text in texts.items()}
        properties, required = dict[str, Schema](), list[str]()
        for field in written_fields(annotation):
            kind = _without_none(field.annotation) if field.optional else field.annotation
            properties[field.name] = json_schema(kind) | about.get(field.attribute, {})
            required += [] if field.optional else [field.name]
        return {"type": "object", "properties": properties, "required": required}
    # What is left is a literal, a mapping, an optional value or a tuple.
    items = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return {"enum": list(items)}
    if typing.get_origin(annotation) is Mapping:
        return {"type": "object", "additionalProperties": json_schema(items[1])}
    if _is_named_tuple(annotation):
        items = (*typing.get_type_hints(annotation).values(),)
    elif type(None) in items:
        schema = json_schema(_without_none(annotation))
        return {**schema, "type": [schema["type"], "null"]}
    elif ... in items:
        return {"type": "array", "items": json_schema(items[0])}
    schemas = [json_schema(item) for item in dict.fromkeys(items)]
    alternative = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"type": "array", "items": alternative, "minItems": len(items), "maxItems": len(items)}


def arrow_type(annotation: Any) -> Any:
    """Return the Arrow type of the values of a type.

    Raises:
        TypeError: there is none, as for an array of NumPy.
    """
    import pyarrow

    items, origin = typing.get_args(annotation), typing.get_origin(annotation)
    if annotation in _PLAIN:
        return pyarrow.type_for_alias(_PLAIN[annotation][1])
    if origin is Literal:
        return pyarrow.string()
    if origin is Mapping:
        return pyarrow.map_(*map(arrow_type, items))
    if type(None) in items:
        return arrow_type(_without_none(annotation))
    if origin is tuple:
        return pyarrow.list_(arrow_type(items[0]))
    if _is_named_tuple(annotation):
        hints = typing.get_type_hints(annotation)
        return pyarrow.struct([(name, arrow_type(kind)) for name, kind in hints.items()])
    if hasattr(annotation, "__dataclass_fields__"):
        return pyarrow.struct([*arrow_fields(annotation).items()])
    raise TypeError(f"{annotation} has no type of Arrow")


def arrow_fields(kind: Any) -> dict[str, Any]:
    """Return the Arrow types of a dataclass by the names that are written; errors as above."""
    return {field.name: arrow_type(field.annotation) for field in written_fields(kind)}


def _without_none(annotation: Any) -> Any:
    """Return X for `X | None`."""
    assert typing.get_origin(annotation) in (types.UnionType, typing.Union)
    (kind,) = (item for item in typing.get_args(annotation) if item is not type(None))
    return kind


def _is_named_tuple(annotation: Any) -> bool:
    return isinstance(annotation, type) and hasattr(annotation, "_fields")
