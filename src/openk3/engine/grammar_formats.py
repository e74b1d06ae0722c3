"""The pieces of a structural tag in K3's format: channels, calls, typed arguments, JSON.

Arguments of a call follow the properties of its schema, each in its own element with its type. A
schema that is not a plain object with named properties takes the form that K3 has for it: one JSON
text for all arguments.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from openk3.errors import InputError
from openk3.text.special_tokens import CLOSE, OPEN, SEP
from openk3.text.xtml import markup

Format = dict[str, Any]
Schema = Mapping[str, Any]

MAX_SCHEMA_CHARS = 100_000
MAX_PROPERTIES = 256
MAX_REPEATS = 100_000
REPEATS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAX_ALTERNATIVES = 64
MAX_DEPTH = 32
"""Objects within objects; the automaton grows with the square of it."""
NAMES = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
"""Python's type of a JSON value to the type of an argument, as K3 names it."""
KINDS = tuple(dict.fromkeys(NAMES.values()))
NOT_PLAIN = (
    "anyOf oneOf allOf not if $ref patternProperties enum const minProperties maxProperties "
    "propertyNames dependentRequired"
).split()


def text(value: str) -> Format:
    """Exactly this text."""
    if not value:
        return {"type": "regex", "pattern": ""}
    return {"type": "const_string", "value": value}


def sequence(elements: list[Format]) -> Format:
    """One after the other."""
    return {"type": "sequence", "elements": elements}


def either(forms: list[Format]) -> Format:
    """One of some."""
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}


def guarded(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call into xgrammar. Raises InputError with its reason for a schema that it refuses."""
    try:
        return function(*arguments, **options)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].split(": ", 1)[-1]
        raise InputError(f"no grammar can be made of this schema: {reason:.300}") from None


_LITERAL = re.compile(r'\[(?:\\.|[^\]\\])*\]|"(?:\\.|[^"\\])*"')
_ESCAPE = re.compile(r"\\(?:x[89a-f][0-9a-f](?=[0-9A-Fa-f])|.)")


def unambiguous(grammar: str) -> str:
    r"""A grammar's text, whose strings are cut behind a letter such as "\xdf" where a hexadecimal
    digit follows: xgrammar 0.2.9 writes the two so, and reads "\xdfe" as one letter ("Straße")."""

    def cut(found: re.Match) -> str:
        return found[0] + '" "' if len(found[0]) == 4 else found[0]

    def literal(found: re.Match) -> str:
        whole = found[0]
        pieces = whole if whole[0] == "[" else _ESCAPE.sub(cut, whole)
        return whole if pieces == whole else f"({pieces})"

    return _LITERAL.sub(literal, grammar)


class Formats:
    """Makes formats of one vocabulary. ids: marker to token id."""

    def __init__(self, ids: Mapping[str, int], xgrammar: Any) -> None:
        self._ids = ids
        self._grammar = xgrammar.Grammar

    def free(self) -> Format:
        """Any text; no marker."""
        return {"type": "any_tokens", "exclude_tokens": list(self._ids.values())}

    def open(self, tag: str, attributes: str = "") -> list[Format]:
        """An opening tag."""
        return [self._token(OPEN), text(tag + attributes), self._token(SEP)]

    def close(self, tag: str) -> list[Format]:
        """A closing tag."""
        return [self._token(CLOSE), text(tag), self._token(SEP)]

    def _token(self, name: str) -> Format:
        return {"type": "token", "token": self._ids[name]}

    def json(self, schema: Schema | bool, where: str, *, strict: bool = True) -> Format:
        """Compact JSON of a schema. Raises InputError for one that cannot be followed."""
        self.check(schema, where)
        grammar = guarded(
            self._grammar.from_json_schema,
            json.dumps(schema),
            any_whitespace=False,
            separators=(",", ":"),
            strict_mode=strict,
        )
        return {"type": "grammar", "grammar": unambiguous(str(grammar))}

    def check(self, schema: Any, where: str) -> None:
        """Raises InputError for a schema that is too large, too deep or has an unusable pattern."""
        level, depth, properties = [schema], 0, 0
        while level:
            depth += 1
            if depth > 2 * MAX_DEPTH:  # a property is two levels of JSON
                raise InputError(f"{where}: the schema is nested more than {MAX_DEPTH} deep")
            for node in level:
                if not isinstance(node, Mapping):
                    continue
                if isinstance(node.get("pattern"), str):
                    guarded(self._grammar.from_regex, node["pattern"])
                if any(_above(node.get(key), MAX_REPEATS) for key in REPEATS):
                    raise InputError(f"{where}: lengths may be at most {MAX_REPEATS}")
                if isinstance(node.get("properties"), Mapping):
                    properties += len(node["properties"])
            if properties > MAX_PROPERTIES:
                raise InputError(f"{where}: the schema names more than {MAX_PROPERTIES} properties")
            level = [child for node in level for child in _children(node)]
        if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
            raise InputError(f"{where}: the schema has more than {MAX_SCHEMA_CHARS} characters")

    def calls(self, tools: Sequence[Mapping[str, Any]], parallel: bool) -> Format:
        """The tools channel with at least one call."""
        one = either([self._call(tool["function"]) for tool in tools])
        body = {"type": "plus", "content": one} if parallel else one
        return sequence([*self.open("tools"), body, *self.close("tools")])

    def _call(self, function: Mapping[str, Any]) -> Format:
        lead = f'call tool="{markup.escape(function["name"])}" index="'
        index = {"type": "regex", "pattern": "[1-9][0-9]?"}
        start = [self._token(OPEN), text(lead), index, text('"'), self._token(SEP)]
        return sequence([*start, *self._arguments(function), *self.close("call")])

    def _arguments(self, function: Mapping[str, Any]) -> list[Format]:
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        where = f"tool {function['name']}"
        body = self.json(schema, where)  # also says what is wrong with a schema
        if not _is_plain(schema):
            return [*self.open("json", ' type="object"'), body, *self.close("json")]
        arguments = []
        for key, value in schema.get("properties", {}).items():
            argument = self._argument(key, value, schema, where)
            if key not in schema.get("required", ()):
                argument = {"type": "optional", "content": argument}
            arguments.append(argument)
        return arguments

    def _argument(self, key: str, schema: Any, root: Schema, where: str) -> Format:
        forms = []
        for one in _alternatives(schema, root):
            for kind in _kinds(one):
                if len(forms) == MAX_ALTERNATIVES:
                    raise InputError(f"{where}.{key} has more than {MAX_ALTERNATIVES} alternatives")
                value = self._value(kind, one, root, f"{where}.{key}")
                lead = self.open("argument", f' key="{markup.escape(key)}" type="{kind}"')
                forms.append(sequence([*lead, value, *self.close("argument")]))
        if not forms:
            raise InputError(f"{where}.{key}: its schema allows no value")
        return either(forms)

    def _value(self, kind: str, schema: Schema, root: Schema, where: str) -> Format:
        """An argument's text: a string as it is, all else as JSON."""
        values = _listed_values(schema)
        if values is not None:
            of_kind = [value for value in values if NAMES[type(value)] == kind]
            return either([text(_written(value)) for value in of_kind])
        if kind == "string":
            return self._string(schema)
        wanted = "integer" if kind == "number" and "integer" in _types(schema) else kind
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return self.json({**schema, **shared, "type": wanted}, where)

    def _string(self, schema: Schema) -> Format:
        if pattern := schema.get("pattern"):
            # a pattern may match anywhere in a value unless it is anchored
            lead = "" if pattern.startswith("^") else r"[\s\S]*"
            tail = "" if pattern.endswith("$") else r"[\s\S]*"
            core = pattern.removeprefix("^").removesuffix("$")
            return {"type": "regex", "pattern": f"{lead}({core}){tail}"}
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            return {"type": "regex", "pattern": rf"[\s\S]{{{least},{most}}}"}
        return self.free()


def _above(value: Any, most: int) -> bool:
    return isinstance(value, (int, float)) and value > most


def _children(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return list(node) if isinstance(node, list) else []


def _is_plain(schema: Any) -> bool:
    """An object whose arguments are all named: no alternatives, no conditions."""
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        return False
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or any(key in schema for key in NOT_PLAIN):
        return False
    is_open = bool(schema.get("additionalProperties")) and not properties
    return set(schema.get("required") or ()) <= set(properties) and not is_open


def _alternatives(schema: Any, root: Schema, depth: int = 0) -> Iterator[Schema]:
    """The schemas of which a value must fit one, references followed."""
    if depth > MAX_DEPTH:
        raise InputError("the alternatives of a property lead back to itself, or are too deep")
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InputError(f"a property's schema must be an object, not {schema!r:.80}")
    parts = schema.get("anyOf") or schema.get("oneOf")
    if "$ref" in schema:
        parts = [_pointed_at(str(schema["$ref"]), root)]
    if not isinstance(parts, list):
        yield schema
        return
    for part in parts:
        yield from _alternatives(part, root, depth + 1)


def _pointed_at(pointer: str, root: Schema) -> Any:
    found: Any = root
    for step in pointer.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            raise InputError(f"$ref {pointer!r:.80} points nowhere in its schema")
        found = found[key]
    return found


def _types(schema: Schema) -> list[str]:
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _listed_values(schema: Schema) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _kinds(schema: Schema) -> list[str]:
    """The types that a value of this schema may have."""
    values = _listed_values(schema)
    if values is not None:
        return list(dict.fromkeys(NAMES[type(value)] for value in values))
    if not _types(schema):
        return list(KINDS)
    for name in _types(schema):
        if name not in (*KINDS, "integer"):
            raise InputError(f"type {name!r:.80} is not one of JSON schema's")
    return list(dict.fromkeys("number" if n == "integer" else n for n in _types(schema)))


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
