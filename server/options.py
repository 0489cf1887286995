"""Reads the settings from their sources, the stronger first: flag, environment, YAML file, default."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from server.settings import Settings
from server.speculative_config import SpeculativeConfig

ENV_PREFIX = "DSPARK_"
_ALIASES = {"speculative_config": ["-sc"]}
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


class SettingsError(ValueError):
    """A setting is wrong; the message names the flag, variable or key that holds it."""


def flag_name(field: str) -> str:
    """The command-line flag of a field."""
    return "--" + field.replace("_", "-")


def env_name(field: str) -> str:
    """The environment variable of a field."""
    return ENV_PREFIX + field.upper()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` one flag for every field; absent flags leave no trace in the parsed namespace."""
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help="read settings from this file; its keys are the flags' names",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in Settings.model_fields.items():
        extra = _extra(field)
        group = groups.get(extra["group"])
        if group is None:
            group = groups[extra["group"]] = parser.add_argument_group(extra["group"])
        common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field)}
        flags = [flag_name(name), *_ALIASES.get(name, [])]
        if name == "model":
            group.add_argument("model", nargs="?", metavar="MODEL", **common)
        elif field.annotation is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
        elif _is_list(field):
            group.add_argument(*flags, nargs="+", metavar=extra["metavar"], **common)
        else:
            group.add_argument(*flags, metavar=_metavar(name, field), **common)


def load(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Merge the sources and check the result. `flags` holds only what was given on the command line."""
    environ = os.environ if environ is None else environ
    given = dict(flags)
    path = given.pop("config", None) or environ.get(ENV_PREFIX + "CONFIG")
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}

    def take(source: Mapping[str, Any], describe: Any) -> None:
        for name, value in source.items():
            origin[name] = describe(name)
            values[name] = _parsed(name, value, origin[name])

    if path:
        take(_read_yaml(path), lambda name: f"{name} in {path}")
    take(_read_env(environ), env_name)
    take(given, lambda name: "MODEL" if name == "model" else flag_name(name))
    try:
        return Settings.model_validate(values)
    except ValidationError as exc:
        raise SettingsError(_explain(exc, origin)) from None


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as exc:
        raise SettingsError(f"cannot read the configuration {path}: {exc.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{path} is not valid YAML: {' '.join(str(exc).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path} must hold a mapping of settings, not a {type(content).__name__}")
    result: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in Settings.model_fields:
            raise SettingsError(f"unknown key {key!r} in {path}")
        if value is not None:
            result[name] = value
    return result


def _read_env(environ: Mapping[str, str]) -> dict[str, str]:
    result = {}
    for name in Settings.model_fields:
        value = environ.get(env_name(name))
        # Kubernetes gives every pod DSPARK_PORT=tcp://... once a Service is called "dspark".
        if value and not (name == "port" and value.startswith("tcp://")):
            result[name] = value
    return result


def _parsed(name: str, value: Any, origin: str) -> Any:
    """Bring a value written as text into the shape of its field; numbers are left to the validation."""
    field = Settings.model_fields[name]
    if not isinstance(value, str):
        return value
    if field.annotation is bool:
        lowered = value.strip().lower()
        if lowered not in _TRUE | _FALSE:
            raise SettingsError(f"{origin}: must be true or false, not {value!r}")
        return lowered in _TRUE
    if _is_list(field):
        return value.replace(",", " ").split()
    if field.annotation is SpeculativeConfig:
        try:
            return json.loads(value)
        except ValueError as exc:
            raise SettingsError(f"{origin}: not valid JSON: {exc}") from None
    return value


def _explain(exc: ValidationError, origin: Mapping[str, str]) -> str:
    error = exc.errors(include_url=False, include_input=True)[0]
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return message
    name, *inner = (str(part) for part in error["loc"])
    where = origin.get(name, flag_name(name))
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key {inner[-1]!r}"
    where = ": ".join([where, ".".join(inner)]) if inner else where
    got = "" if error["type"] == "value_error" else f" (got {str(error['input'])[:80]!r})"
    return f"{where}: {message[0].lower()}{message[1:]}{got}"


def _extra(field: FieldInfo) -> dict[str, Any]:
    assert isinstance(field.json_schema_extra, dict)
    return dict(field.json_schema_extra)


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is list


def _metavar(name: str, field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "{" + ",".join(get_args(field.annotation)) + "}"
    return _extra(field)["metavar"] or name.rpartition("_")[2].upper()


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    default = field.default
    if "(default" in text or default in (None, []) or isinstance(default, BaseModel):
        return text
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f"{text} (default: {default:g})" if isinstance(default, float) else f"{text} (default: {default})"
