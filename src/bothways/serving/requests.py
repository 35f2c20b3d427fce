"""Fields of requests: each route declares them as a pydantic model, and the rest is refused.

    class EmbedRequest(TruncatedRequest):
        inputs: Texts
        normalize: Flag = True

From such a declaration come the validation, the message about a field that is unknown or has
another type, and the schema in the OpenAPI document. Answers are declared by a TypedDict next to
the function that writes them: mypy compares both, and the document is built from it. Null is as
good as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StrictStr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema

from bothways.serving.errors import Limits, RequestError
from bothways.tasks.base import did_you_mean

Schema = dict[str, Any]
R = TypeVar("R", bound="Fields")


def _whole(value: Any) -> Any:
    """Return a number as it is; 8.0 is 8, since JSON has only one kind of numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def bounded(value: Any, info: ValidationInfo) -> Any:
    """Refuse more items than the limit, before anything is done with them."""
    limits = info.context
    if isinstance(limits, Limits) and isinstance(value, list):
        if value and isinstance(value[0], int):  # token ids of one text
            limits.check("text_characters", "token ids", len(value))
        else:
            limits.check("texts", info.field_name or "", len(value))
    return value


def _texts(value: Any) -> Any:
    if isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    ):
        return value
    raise ValueError("must be a text or a list of texts")


def per_item(read: Callable[[Any], Any]) -> AfterValidator:
    """Read the value of a field, or each item of a list, by a function that raises ValueError."""
    return AfterValidator(
        lambda value: [read(item) for item in value] if isinstance(value, list) else read(value)
    )


def check_input(value: Any) -> Any:
    """Return an input of a predictor: a pair is a tuple."""
    if isinstance(value, str | dict):
        return value
    if isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value):
        return tuple(value)
    raise ValueError("must be a text, a list of two texts, or an object with columns")


def list_of(items: Schema, **constraints: Any) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items, **constraints}


def either(*schemas: Schema) -> Schema:
    """Return the schema of a value that one of several describes."""
    return {"anyOf": list(schemas)}


TEXT: Schema = {"type": "string"}
PAIR = list_of(TEXT, minItems=2, maxItems=2)
Text = StrictStr
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True, ge=0), BeforeValidator(_whole)]
Count = Annotated[int, Field(strict=True, ge=1), BeforeValidator(_whole)]
ROW = either(TEXT, PAIR, {"type": "object"})
Input = Annotated[Any, AfterValidator(check_input), WithJsonSchema(ROW)]
"""A text, a pair as a list, or an object with columns."""
Items = Annotated[Any, BeforeValidator(bounded)]
"""A value that may be a list, one item for each input."""
Texts = Annotated[
    Items,
    AfterValidator(_texts),
    WithJsonSchema(either(TEXT, list_of(TEXT, minItems=1))),
]
TextList = Annotated[
    Texts, AfterValidator(lambda texts: texts if isinstance(texts, list) else [texts])
]
"""A text or a list of texts, read as a list."""
Prompt = Annotated[
    Text, Field(description="a prompt of the model, put before the text; absent: its default one")
]
Meaningless = Annotated[Any, WithJsonSchema({"description": "accepted, and without effect"})]
"""A field that clients always send, and that means nothing here."""


class Fields(BaseModel):
    """The fields of an object in a request; others are refused."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> Schema:
        """Build the JSON schema, in which fields that may be absent may be null."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name in schema["properties"].keys() - schema.get("required", ()):
            field = schema["properties"][name]
            if {"type": "null"} not in field.get("anyOf", ()):
                schema["properties"][name] = either(field, {"type": "null"})
        return schema

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        declared = cls.model_fields
        return {
            name: value for name, value in data.items() if value is not None or name not in declared
        }


class RequestBody(Fields):
    """Fields of every request."""

    model: Annotated[Text, Field(description="with a single model any name will do")] | None = None


class Truncation(Fields):
    """Treatment of texts that are longer than the model reads."""

    truncate: Annotated[Flag, Field(description="false: a text that is too long is an error")] = (
        True
    )
    truncation_direction: Annotated[
        Literal["right", "Right"], Field(description="long texts lose their end")
    ] = "right"


class TruncatedRequest(RequestBody, Truncation):
    """A request with texts that may be too long."""


class Options(Fields):
    """Options of Hugging Face's hosted API, which clients send: they have no effect here."""

    use_cache: Meaningless = None
    wait_for_model: Meaningless = None
    use_gpu: Meaningless = None


class HostedRequest(TruncatedRequest):
    """A request of Hugging Face's clients, which send `truncate` at the root or below."""

    parameters: Truncation = Truncation()
    options: Options = Options()

    @property
    def cuts(self) -> bool:
        """True if texts that are too long are cut."""
        return self.truncate and self.parameters.truncate


def parse(request: type[R], body: Mapping[str, Any], limits: Limits) -> R:
    """Return the fields of a body.

    Raises:
        RequestError: a field is unknown, missing, or has another type; too many items.
    """
    try:
        return request.model_validate(body, context=limits)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
    # An unknown name first: it may be the one that is missing under another.
    fault = min(errors, key=lambda fault: fault["type"] != "extra_forbidden")
    names = [str(name) for name in fault["loc"]]
    path, name = ".".join(names) or "the body", names[-1] if names else ""
    message, value = str(fault["msg"]), fault.get("input")
    match fault["type"]:
        case "extra_forbidden":
            fields: type[Fields] = request  # the declaration of the object at the path
            for key in names[:-1]:
                field = fields.model_fields.get(key)
                inner = None if field is None else field.annotation
                if not (isinstance(inner, type) and issubclass(inner, Fields)):
                    break
                fields = inner
            field_names = [x for x in fields.model_fields if x != "model"]
            near = did_you_mean(name, field_names) or "; there are"
            message = f"{path[:100]} is unknown{near} {', '.join(field_names)}"
        case "missing":
            message = f"{path} is missing"
        case "model_type":
            message = f"{path} must be an object"
        case _:
            message = message.removeprefix("Value error, ").replace("Input should be", "must be")
            value_text = f", not {value!r:.50}" if isinstance(value, str | int | float) else ""
            message = f"{path} {message}{value_text if 'must be' in message else ''}"
    raise RequestError("invalid", message, param=path[:100])


class _Schemas(GenerateJsonSchema):
    """JSON schemas without titles, which repeat the names of fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False."""
        return False


def build_schema(annotation: Any, definitions: dict[str, Schema]) -> Schema:
    """Build the JSON schema of a request or an answer from its type.

    Args:
        annotation: a model of pydantic, a TypedDict, or a type made of these.
        definitions: receives the schemas of types within it, by their names.
    """
    schema: Schema = TypeAdapter(annotation).json_schema(
        ref_template="#/components/schemas/{model}", schema_generator=_Schemas
    )
    definitions.update(schema.pop("$defs", {}))
    return schema
