"""Reads settings from where they are given: a YAML file, variables, flags, nested plain values.

Every error is one line that names the place, the source and the setting that was probably meant.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from alignedserve.config.setting import PREFIX, Setting
from alignedserve.errors import ConfigError, file_errors

Settings = Mapping[str, Setting]  # path -> its declaration


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Return the tree of a YAML file; an empty file gives an empty tree."""
    import yaml  # here, so that --help does not wait for it

    try:
        with file_errors(ConfigError, path, "read"):
            text = path.read_text(encoding="utf-8")
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
            _refuse_repeated_keys(node, path)
            tree = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold settings by name, not {_noun(tree)}")
    return tree


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the tree of a JSON file."""
    try:
        with file_errors(ConfigError, path, "read"):
            text = path.read_text(encoding="utf-8")
            tree = json.loads(
                text, object_pairs_hook=partial(_json_object, path, text), parse_constant=_refuse_constant
            )
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold settings by name, not {_noun(tree)}")
    return tree


def _json_object(path: Path, text: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            _refuse_repeated_keys_of_json(text, path)
            raise ConfigError(f"{path}: {key} is given {'twice' if times == 2 else f'{times} times'} in one object")
    return dict(pairs)


def _refuse_repeated_keys_of_json(text: str, path: Path) -> None:
    """Refuse repeated keys with their line, which Python's reader of JSON does not know. The reader of YAML does, and
    it reads nearly all JSON, except tabs."""
    import yaml

    with suppress(yaml.YAMLError):
        _refuse_repeated_keys(yaml.compose(text.replace("\t", " "), yaml.SafeLoader), path)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_repeated_keys(node: Any, path: Path) -> None:
    """Refuse a key that is given twice: PyYAML would keep the last and drop all that the first section says."""
    kind = getattr(node, "id", None)
    if kind == "sequence":
        for item in node.value:
            _refuse_repeated_keys(item, path)
    if kind != "mapping":
        return
    seen = set()
    for key, value in node.value:
        if str(key.value) in seen:
            raise ConfigError(f"{path}: {key.value} is given twice, again in line {key.start_mark.line + 1}")
        seen.add(str(key.value))
        _refuse_repeated_keys(value, path)


def read_tree(tree: Mapping[str, Any], source: str, settings: Settings) -> dict[str, Any]:
    """Return typed values by path, from nested values."""
    values = {}
    for path, value in _flatten(tree, source, _sections(settings)):
        values[path] = _typed(_known(path, source, settings), value, f"{source}: {path}")
    return values


def _flatten(
    tree: Mapping[Any, Any], source: str, sections: Sequence[str], above: str = ""
) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{above}{key}"
        if "." in str(key):
            raise ConfigError(f"{source}: {path!r} is not a setting: a file names them by section, without dots")
        if path not in sections:
            yield path, value
        elif isinstance(value, Mapping):
            yield from _flatten(value, source, sections, f"{path}.")
        elif value is not None:  # all of a section's lines may be commented out
            raise ConfigError(f"{source}: {path} is a section of settings, not {_noun(value)}")


def read_environment(env: Mapping[str, str], settings: Settings) -> dict[str, Any]:
    """Return the values of all variables that begin with our prefix, by path."""
    by_variable = {setting.variable: setting for setting in settings.values()}
    values = {}
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or _is_service_link(variable, text):
            continue
        if variable not in by_variable:
            raise ConfigError(f"environment: {variable} is not a setting{hint(variable, by_variable, '_')}")
        setting = by_variable[variable]
        values[setting.path] = _from_text(setting, text, f"{variable}: {setting.path}")
    return values


def _is_service_link(variable: str, text: str) -> bool:
    """Return whether Kubernetes set the variable, as it does in every pod for Services whose names begin like ours."""
    if re.search(r"_SERVICE_HOST$|_SERVICE_PORT(_.*)?$|_PORT_\d+_(TCP|UDP|SCTP)(_.*)?$", variable):
        return True
    return variable.endswith("_PORT") and re.match(r"(tcp|udp|sctp)://", text) is not None


def read_flags(flags: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return typed values by path, from values by path that may be text."""
    values = {}
    for path, value in flags.items():
        setting = _known(path, "flags", settings)
        flag = setting.flags[0] if setting.flags else "--set"
        values[path] = read_value(setting, value, f"{flag}: {path}")
    return values


def read_settings(texts: Iterable[str], flag: str, settings: Settings) -> dict[str, Any]:
    """Return typed values by path, from texts `path=value`, each path once."""
    values: dict[str, Any] = {}
    for text in texts:
        path, is_there, value = text.partition("=")
        if not is_there:
            raise ConfigError(f"{flag} {text!r:.60} must be a setting and its value, such as schedule.room=growing")
        setting = _known(path, flag, settings)
        if path in values:
            raise ConfigError(f"{flag} {path} is given twice")
        values[path] = read_value(setting, value, f"{flag} {path}")
    return values


def read_value(setting: Setting, value: Any, where: str) -> Any:
    """Return the value, which may be text, as the setting's type."""
    return _from_text(setting, value, where) if isinstance(value, str) else _typed(setting, value, where)


def _known(path: str, source: str, settings: Settings) -> Setting:
    if path in _sections(settings):
        first = next(inner for inner in settings if inner.startswith(f"{path}."))
        raise ConfigError(f"{source}: {path} is a section of settings: name a setting in it, such as {first}")
    if path not in settings:
        shown = path if path.isprintable() else repr(path)
        meant = hint(path, [*settings, *_sections(settings)])
        raise ConfigError(f"{source}: {shown} is not a setting{meant}")
    return settings[path]


def _sections(settings: Settings) -> list[str]:
    return list(dict.fromkeys(path.partition(".")[0] for path in settings if "." in path))


def hint(wrong: str, right: Iterable[str], separator: str = ".") -> str:
    """Return a question for the nearest right name, which ends like the wrong name or is spelled much like it."""
    import difflib

    names = list(right)
    ends_alike = [name for name in names if name.endswith(separator + wrong.removeprefix(PREFIX))]
    near = ends_alike or difflib.get_close_matches(wrong, names, 1)
    return f": did you mean {near[0]}?" if near else ""


def _from_text(setting: Setting, text: str, where: str) -> Any:
    """Return the value that a flag or a variable says."""
    if _is_automatic(setting, text):
        return None
    try:
        value: Any = _PARSERS[setting.kind](text) if setting.kind in _PARSERS else text
    except (ValueError, KeyError):
        raise _wrong(setting, text, where) from None
    return _typed(setting, value, where)


def _is_automatic(setting: Setting, value: Any) -> bool:
    """Return whether the value leaves a number, or a yes or no, to its default, which is no value but a rule."""
    return value == "auto" and setting.optional and setting.kind in _PARSERS


_PARSERS: dict[type, Any] = {
    int: int,
    float: float,
    bool: {"true": True, "1": True, "false": False, "0": False}.__getitem__,
}


def _typed(setting: Setting, value: Any, where: str) -> Any:
    """Return the value as the setting's type. It must have that type already, except where only text can say it."""
    if _is_automatic(setting, value):
        return None
    try:
        typed = None if value is None and setting.optional else _convert(setting.kind, value)
    except (TypeError, ValueError, OverflowError):
        raise _wrong(setting, value, where) from None
    problem = setting.problem(typed)
    if problem:
        raise ConfigError(f"{where} {problem}")
    return typed


def _convert(kind: type, value: Any) -> Any:
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, str) and issubclass(kind, Enum):
        return kind(value)
    if type(value) in (bool, int) and issubclass(kind, Enum):  # what YAML makes of on, off and numbers
        return kind({"True": "on", "False": "off"}.get(str(value), str(value)))
    if isinstance(value, str) and hasattr(kind, "parse"):
        return kind.parse(value)
    if isinstance(value, Mapping) and hasattr(kind, "from_mapping"):
        return kind.from_mapping(value)
    raise TypeError


def _wrong(setting: Setting, value: Any, where: str) -> ConfigError:
    given = "" if setting.secret else f", not {_noun(value)}"
    return ConfigError(f"{where} must be {_wanted(setting)}{given}")


def _wanted(setting: Setting) -> str:
    if setting.choices:
        return f"one of {', '.join(setting.choices)}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    # For values with a parser of their own, their type or else the help says how to write them.
    return names.get(setting.kind, getattr(setting.kind, "FORM", setting.help))


def _noun(value: Any) -> str:
    """Return words for the value that was given instead, cut where it is long."""
    plain = {type(None): "nothing", dict: "a section", list: "a list", bool: str(value).lower()}
    if type(value) in plain:
        return plain[type(value)]
    kind = {int: "number", float: "number", str: "text"}.get(type(value), type(value).__name__)
    shown = repr(value) if isinstance(value, str) else str(value)
    return f"the {kind} {shown if len(shown) <= 60 else f'{shown[:57]}...'}"
