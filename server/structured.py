"""response_format, text.format, structured_outputs: what they may hold, and the grammar that comes of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from pydantic import ConfigDict, Field, model_validator

from server.errors import invalid
from server.strict import Strict

_MOST_RULES = 1000

# Between the parts of a JSON text: nothing, a blank, or a line break and an indent. A model that may write
# any number of blanks now and then does nothing else any more.
_WHITESPACE = r" |\n {0,40}|\n\t{0,16}"


class _Named(Strict):
    """Has fields that go by another name in Python."""

    model_config = ConfigDict(populate_by_name=True)


class JsonSchema(_Named):
    """A schema with a name, as OpenAI has it. It is kept to whether it is `strict` or not."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's form: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _matching(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema goes with type "json_schema", and only with it')
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """None for any text."""
        return _schema_of_answer(self.type, None if self.json_schema is None else self.json_schema.schema_)


class TextFormat(_Named):
    """The same as /v1/responses has it, with the schema's fields beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _matching(self) -> Self:
        described = self.model_fields_set & {"name", "description", "schema_", "strict"}
        if self.type != "json_schema" and described:
            raise ValueError('name, description, schema and strict go with type "json_schema" only')
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError('type "json_schema" needs a name and a schema')
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """None for any text."""
        return _schema_of_answer(self.type, self.schema_)


class StructuredOutputs(_Named):
    """vLLM's form: a JSON schema, a regular expression, a choice of texts, or a grammar (Lark or GBNF)."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=1 << 16)] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if sum(value is not None for value in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("give exactly one of json, regex, choice and grammar")
        return self


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must look like: the right-hand side of a Lark `rule`, or a client's whole `grammar`.

    `param` is the field that asked for it.
    """

    param: str
    rule: str | None = None
    grammar: str | None = None


def _schema_of_answer(kind: str, schema: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if kind == "text" else schema if schema is not None else {"type": "object"}


def form_of(schema: dict[str, Any] | None, param: str, outputs: StructuredOutputs | None) -> Form | None:
    """None if anything goes. `schema` is what the field `param` asks for. Raises ApiError."""
    if outputs is None:
        return None if schema is None else Form(param, json_rule(schema))
    if schema is not None:
        raise invalid(f"Give {param} or structured_outputs, not both.", "structured_outputs")
    return _form_of_outputs(outputs)


def _form_of_outputs(outputs: StructuredOutputs) -> Form:
    if outputs.json_ is not None:
        return Form("structured_outputs.json", json_rule(_schema(outputs.json_)))
    if outputs.regex is not None:
        return Form("structured_outputs.regex", f"/{regex_to_lark(outputs.regex)}/")
    if outputs.choice is not None:
        return Form("structured_outputs.choice", " | ".join(literal(text) for text in outputs.choice))
    return Form("structured_outputs.grammar", grammar=outputs.grammar)


def json_rule(schema: dict[str, Any], lenient: bool = False) -> str:
    """JSON of a schema, as a rule's right-hand side; if `lenient`, what is not supported of it is ignored."""
    options = {"whitespace_pattern": _WHITESPACE} | ({"lenient": True} if lenient else {})
    return "%json " + json.dumps(schema | {"x-guidance": options})


def literal(text: str) -> str:
    """Exactly this text, in a rule."""
    return json.dumps(text, ensure_ascii=False)


def lark(text: str) -> str:
    """A client's grammar: Lark as it is, GBNF (it has `::=`) translated. May take long; raises ApiError."""
    rules = text.count("::=")
    if not rules:
        return text
    if rules > _MOST_RULES:  # the translator looks at each of them once for each of them
        raise invalid(
            f"A GBNF grammar may have {_MOST_RULES} rules, not {rules}.", "structured_outputs.grammar"
        )
    try:
        return any_to_lark(text)
    except Exception as error:  # the translator may trip over anything
        raise invalid(f"The grammar is not valid GBNF: {error}", "structured_outputs.grammar") from None


def _schema(value: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = ""
    if not isinstance(value, dict):
        raise invalid("The schema should be a JSON object.", "structured_outputs.json")
    return value
