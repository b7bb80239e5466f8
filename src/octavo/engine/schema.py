"""JSON schemas before they become grammars: what is enforced, and what is refused by name.

Decides which keywords a grammar can enforce, and brings a schema into the form that the grammar
compiler takes. Knows neither tokens nor the compiler.

Invariant: a keyword that would not be enforced is an error that names it and its place, so output
that a grammar of the returned schema accepts is valid under the schema that was given. (Formats are
enforced too, though JSON Schema lets a validator ignore them.)
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from octavo.errors import BadRequestError, nearest

Json = dict[str, Any]

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 10_000
MAX_SCHEMA_CHARS = 1 << 18
# The compiler intersects the expressions of schemas that hold at once, at a cost that doubles with
# each, and no limit of its own ends it.
MAX_JOINED_EXPRESSIONS = 8
# Compiling goes through every remainder: 0.5 s for 100,000, no end within 8 s for a million.
MAX_MULTIPLE = 100_000
_INLINE_OPTIONS = "x-guidance"  # by which a schema would set options of the compiler

_ONE = frozenset({"items", "additionalProperties", "additionalItems"})
_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)
_VALUES = frozenset({"type", "enum", "const", "required", "pattern", "format", "$ref"})
_NAMES = frozenset({"$schema", "$id", "$anchor"})
ENFORCED = _ONE | _LISTS | _MAPS | _NUMBERS | _COUNTS | _VALUES
# Keywords of JSON Schema that say what is valid and that no grammar here can enforce.
REFUSED = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
        "$vocabulary",
        "id",
        "extends",
        "disallow",
        "divisibleBy",
    ]
)
# Keywords that say nothing of what is valid, nor does any word that is none of JSON Schema.
_ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "nullable",
        "discriminator",
        "xml",
        "externalDocs",
        "propertyOrdering",
        "strict",
    ]
)
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
# Keywords beside which a reference or a choice of schemas is all that holds.
_ALONE = _NAMES | {"$defs", "definitions", "type"}
# Where a refused keyword changes nothing.
_NEUTRAL: tuple[tuple[str, object], ...] = (("uniqueItems", False), ("minContains", 0))


def parsed_schema(schema: object, where: str = "json") -> Json:
    """Return a schema as an object, from itself or from its text; true is the empty schema."""
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_CHARS:
            raise _too_long(len(schema), where)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"{where} is not JSON: {error}.") from None
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise BadRequestError(f"{where} must be a JSON schema, an object, not {schema!r:.80}.")
    return dict(schema)


def checked_schema(schema: object, where: str = "json") -> Json:
    """Return a copy of `schema` that holds only enforced keywords.

    Raises BadRequestError that names a keyword and its place, as `where` and a path below it, if
    anything would not be enforced or is beyond the limits of depth and size.
    """
    checked = _Checker().schema(parsed_schema(schema, where), where, 0)
    assert isinstance(checked, dict)
    try:
        num_chars = len(json.dumps(checked, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequestError(f"{where} is not JSON: {error}.") from None
    if num_chars > MAX_SCHEMA_CHARS:
        raise _too_long(num_chars, where)
    _check_expressions(checked, where)
    return checked


def patterns(schema: object, where: str = "json") -> Iterator[tuple[str, str]]:
    """Yield every regular expression of a checked schema and the place where it stands."""
    for place, sub in subschemas(schema, where):
        if "pattern" in sub:
            yield sub["pattern"], f"{place}.pattern"
        for pattern in sub.get("patternProperties", ()):
            yield pattern, f"{place}.patternProperties"


def subschemas(schema: object, where: str) -> Iterator[tuple[str, Json]]:
    """Yield every schema within a checked schema and its place; the innermost come first."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _MAPS:
            for name, sub in value.items():
                yield from subschemas(sub, f"{where}.{key}.{name}")
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            for place, sub in enumerate(value):
                yield from subschemas(sub, f"{where}.{key}[{place}]")
        elif key in _ONE:
            yield from subschemas(value, f"{where}.{key}")
    yield where, schema


def _too_long(num_chars: int, where: str) -> BadRequestError:
    return BadRequestError(
        f"{where} has {num_chars:,} characters; a schema may have {MAX_SCHEMA_CHARS:,}."
    )


class _Checker:
    """Walks one schema and counts what it has seen."""

    def __init__(self) -> None:
        self._num_seen = 0

    def schema(self, schema: object, where: str, depth: int) -> Json | bool:
        self._num_seen += 1
        if depth > MAX_DEPTH:
            raise BadRequestError(f"{where} is nested more than {MAX_DEPTH} schemas deep.")
        if self._num_seen > MAX_SUBSCHEMAS:
            raise BadRequestError(f"The schema has more than {MAX_SUBSCHEMAS:,} schemas within.")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise BadRequestError(f"{where} must be a schema, an object, not {schema!r:.80}.")
        checked: Json = {}
        for key, value in schema.items():
            self._keyword(checked, key, value, where, depth)
        _check_together(checked, where)
        return checked

    def _keyword(self, checked: Json, key: object, value: Any, where: str, depth: int) -> None:
        """Add one keyword to `checked`, unless it says nothing."""
        if not isinstance(key, str) or key == _INLINE_OPTIONS or key in REFUSED:
            if (key, value) in _NEUTRAL:
                return
            raise BadRequestError(
                f"{where}: the keyword {key!r} is not supported, and would not be enforced. "
                "Leave it out."
            )
        place = f"{where}.{key}"
        if key in _MAPS:
            items = _mapping(value, place).items()
            checked[key] = {k: self.schema(v, f"{place}.{k}", depth + 1) for k, v in items}
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            checked[key] = [
                self.schema(sub, f"{place}[{i}]", depth + 1)
                for i, sub in enumerate(_nonempty(value, place))
            ]
        elif key in _ONE:
            checked[key] = self.schema(value, place, depth + 1)
        elif key in ENFORCED or key in _NAMES:
            _check_value(key, value, place)
            checked[key] = value
        elif key not in _ANNOTATIONS and (meant := nearest_keyword(key)):
            raise BadRequestError(f"{where}: there is no keyword {key!r}.{meant}")


def nearest_keyword(key: str) -> str:
    """Return a sentence that names the keyword of which `key` looks like a slip, or ""."""
    close = difflib.get_close_matches(key, ENFORCED | REFUSED, n=1, cutoff=0.8)
    return nearest(key, close) if close else ""


def _check_expressions(schema: Json, where: str) -> None:
    """Bound the expressions of a schema in which several schemas hold for one value."""
    num_expressions, joined = 0, ""
    for place, sub in subschemas(schema, where):
        num_expressions += ("pattern" in sub) + ("format" in sub)
        num_expressions += len(sub.get("patternProperties", ()))
        joins = [key for key in ("allOf", "anyOf", "oneOf", "$ref") if key in sub]
        if joins and (joins[0] == "allOf" or len(sub.keys() - _ALONE) > 1):
            joined = joined or f"{place}.{joins[0]}"
    if joined and num_expressions > MAX_JOINED_EXPRESSIONS:
        raise BadRequestError(
            f"{joined} joins schemas, and together they have {num_expressions} pattern, format and "
            f"patternProperties; at most {MAX_JOINED_EXPRESSIONS} are supported there."
        )


def _parts_of(value: float) -> float:
    """Return a number in units of its last decimal: 25 for 0.25."""
    exact = Decimal(str(value))
    exponent = exact.as_tuple().exponent
    is_fraction = isinstance(exponent, int) and exponent < 0
    return float("".join(map(str, exact.as_tuple().digits))) if is_fraction else abs(value)


def _check_value(key: str, value: Any, place: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in _NUMBERS and not is_number:
        raise BadRequestError(f"{place} must be a number, not {value!r:.80}.")
    if key == "multipleOf" and _parts_of(value) > MAX_MULTIPLE:
        raise BadRequestError(
            f"{place} is {value!r:.80}; without its point it may be at most {MAX_MULTIPLE:,}."
        )
    if key in _COUNTS and not (is_number and value == int(value) >= 0):
        raise BadRequestError(f"{place} must be an integer of at least 0, not {value!r:.80}.")
    if key in ("pattern", "format", "$ref", *_NAMES) and not isinstance(value, str):
        raise BadRequestError(f"{place} must be a text, not {value!r:.80}.")
    if key == "format" and value not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise BadRequestError(
            f"{place}: the format {value!r} is not supported. These are: {known}."
        )
    if key == "$ref" and not value.startswith("#"):
        raise BadRequestError(
            f"{place}: {value!r:.80} is outside the schema. Only references that begin with # are "
            "followed."
        )
    if key == "enum":
        _nonempty(value, place)
    if key == "required" and not (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    ):
        raise BadRequestError(f"{place} must be a list of names, not {value!r:.80}.")
    if key == "type":
        types = _nonempty(value, place) if isinstance(value, list) else [value]
        for name in types:
            if not isinstance(name, str) or name not in _TYPES:
                raise BadRequestError(f"{place}: there is no type {name!r:.80}.")


def _check_together(schema: Json, where: str) -> None:
    """Refuse what a grammar cannot count: an object may name one property twice."""
    least = schema.get("minProperties", 0)
    if least > len(set(schema.get("required", ()))) + 1:
        raise BadRequestError(
            f"{where}: minProperties {least} is not supported with fewer than {least - 1:.0f} "
            "required properties. Name the properties in required."
        )


def _mapping(value: object, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadRequestError(f"{place} must be an object, not {value!r:.80}.")
    return value


def _nonempty(value: object, place: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise BadRequestError(f"{place} must be a list with at least one item, not {value!r:.80}.")
    return value
