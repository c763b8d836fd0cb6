"""What the code itself knows, as sections of the docs' pages. `make site` puts them into the site; none is committed.

A page has the line `<!-- generated: settings -->` where a section belongs; `on_page_markdown` is the hook by which
mkdocs replaces it (mkdocs.yml). `python tools/reference_pages.py settings` prints one, without a name all of them.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, get_args

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "tools")]  # the tests have a deployment that shows every metric once

from alignedserve.config import config  # noqa: E402
from alignedserve.config.choices import CALL_FORMATS  # noqa: E402
from alignedserve.config.config import every_setting  # noqa: E402
from alignedserve.config.presets import presets  # noqa: E402
from alignedserve.config.setting import Reach, Setting  # noqa: E402
from alignedserve.core import PreemptionCause, Rejection  # noqa: E402
from alignedserve.gateway.openai.peers import LEFT_OUT, OF_OPTIONS, TAKEN  # noqa: E402
from alignedserve.gateway.openai.strict import Strict  # noqa: E402
from alignedserve.gateway.openapi import bodies, document  # noqa: E402
from alignedserve.jobs.state import LineFate  # noqa: E402
from alignedserve.lab.devices.devices import GPUS, MODELS, Gpu, Model  # noqa: E402
from alignedserve.lab.fuzzing.invariants import Rule  # noqa: E402
from alignedserve.lab.loads.workload.amounts import FORMS, Exponential, Fixed, LogNormal, Uniform  # noqa: E402
from alignedserve.lab.loads.workload.build import ARRIVALS, KINDS, Named, Whole, Windows, keys_of  # noqa: E402
from alignedserve.lab.loads.workload.stream import ClientLimits, Foresight, Span, StreamPromise, Turns  # noqa: E402
from alignedserve.lab.reports.figure_rows import SECTIONS  # noqa: E402
from alignedserve.lab.simulator.machines.faults import Fault  # noqa: E402
from alignedserve.protocol.messages import Message  # noqa: E402
from alignedserve.router import lifecycle  # noqa: E402
from alignedserve.text.calls.formats import FORMATS  # noqa: E402
from alignedserve.text.reasoning.families import FAMILIES  # noqa: E402
from alignedserve.worker.step import states as worker_states  # noqa: E402
from tests.metrics.deployment import exposed  # noqa: E402

# isort: split
import draw_folders  # noqa: E402
from alignedserve.cli.main import command_names, parser_of  # noqa: E402

_WIDTH = 100  # characters of a line of help
_METHODS = "get", "post", "delete"
_EVERYWHERE = {"model_name", "le"}  # labels of nearly all metrics, and of every histogram
_VALUES: Mapping[str, type[Enum]] = {  # labels whose values are an enumeration
    "`reason` of `admission_rejections_total`": Rejection,
    "`cause` of `num_preemptions_total`": PreemptionCause,
    "`outcome` of `batch_line_tries_total`": LineFate,
}


def metric_names() -> Iterator[str]:
    rows = []
    for family in text_string_to_metric_families(exposed()):
        name = family.name.removeprefix("alignedserve:") + "_total" * (family.type == "counter")
        labels = {label for sample in family.samples for label in sample.labels} - _EVERYWHERE
        rows.append((f"`{name}`", family.type, _codes(sorted(labels)), family.documentation))
    yield from _table(("metric", "kind", "labels", "meaning"), rows)
    for label, values in _VALUES.items():
        yield f"## {label}"
        yield from _table(("value", "meaning"), ((f"`{one.value}`", about) for one, about in _members(values)))


def figures() -> Iterator[str]:
    for title, rows in SECTIONS.items():
        yield f"## {title}"
        yield from _table(("figure", "in JSON", "meaning"), ((row.label, f"`{row.path}`", row.about) for row in rows))


def api_fields() -> Iterator[str]:
    told = document(with_jobs=True)
    yield "## Routes"
    routes = [(method, path, told["paths"][path].get(method)) for path in told["paths"] for method in _METHODS]
    answers = [(f"`{method.upper()} {path}`", route["summary"]) for method, path, route in routes if route]
    yield from _table(("route", "answer"), answers)
    yield "## Statuses"
    statuses = told["paths"]["/v1/models"]["get"]["responses"].items()
    yield from _table(("status", "when"), ((status, answer["description"]) for status, answer in statuses))
    for paths, body in _bodies():
        yield f"## Fields of {_codes(paths)}"
        needed = body.model_json_schema().get("required", ())
        known = {field.alias or name: field for name, field in body.model_fields.items()}
        schemas = body.model_json_schema()["properties"]
        rows = ((f"**`{name}`**" if name in needed else f"`{name}`", _takes(schemas[name])) for name in known)
        yield from _table(("field", "takes"), rows)
        yield from _not_honoured(body)
    yield "## Names of other servers"
    yield (
        "llama.cpp's, Ollama's, LM Studio's, DeepSeek's and Mistral's names, in bodies that have the field of ours."
        f" Those of the first table, and {_codes(sorted(OF_OPTIONS))}, may also stand in Ollama's `options`."
    )
    yield from _table(("name", "is"), ((f"`{name}`", _codes(take(True))) for name, take in TAKEN.items()))
    yield f"Named in `x-ignored-fields`, also from `options`: {_codes(sorted(LEFT_OUT))}."
    yield "## Objects within bodies"
    of_bodies = {body for _, body in _bodies()}
    objects = {kind for kind in _all_below(Strict) if of_bodies.isdisjoint(kind.__mro__)}
    for kind in sorted(objects, key=lambda one: one.__name__):
        if told_of_it := [*_not_honoured(kind)]:
            yield f"**{kind.__name__}**. " + " ".join(told_of_it)


def _not_honoured(kind: type[BaseModel]) -> Iterator[str]:
    """Yield which fields of an object are ignored, and which are refused."""
    if ignored := [name for name, field in kind.model_fields.items() if "ignored" in field.metadata]:
        yield f"Named in `x-ignored-fields`: {_codes(sorted(ignored))}."
    if refused := getattr(kind, "UNSUPPORTED", {}):
        yield f"Refused, unless the value asks for nothing: {_codes(sorted(refused))}."


def _all_below(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield all subclasses of the package whose names are public, at any depth."""
    for below in kind.__subclasses__():
        if below.__module__.startswith("alignedserve.") and not below.__name__.startswith("_"):
            yield below
        yield from _all_below(below)


def _bodies() -> Iterator[tuple[list[str], type[BaseModel]]]:
    """Yield each type of a body with the routes that take it."""
    paths: dict[type[BaseModel], list[str]] = {}
    for path, body in bodies():
        paths.setdefault(body, []).append(path)
    yield from ((found, body) for body, found in paths.items())


def _takes(schema: Mapping[str, Any]) -> str:
    """Return what a field takes, in a few words: `number, 0 to 2`."""
    if "$ref" in schema:
        return f"object {schema['$ref'].rpartition('/')[2]}"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            found = dict.fromkeys(_takes(one) for one in schema[several] if one.get("type") != "null")
            return " or ".join(found) or "anything"
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {_takes(schema.get('items', {}))}"
    bounds = (text.format(schema[name]) for name, text in _BOUNDS.items() if abs(schema.get(name, _ENDLESS)) < _ENDLESS)
    return ", ".join((kind, *bounds))


_ENDLESS = 2**31  # a bound that nobody meets
_BOUNDS = {
    "minimum": "{:,} or more",
    "exclusiveMinimum": "more than {:,}",
    "maximum": "{:,} or less",
    "exclusiveMaximum": "less than {:,}",
    "maxLength": "{:,} characters or fewer",
}


def parsers() -> Iterator[str]:
    yield "## Tool calls"
    aliases = {name: [other for other, of in CALL_FORMATS.items() if of == name != other] for name in CALL_FORMATS}
    openings = {form.name: form.openings for form in reversed(FORMATS)}
    rows = ((f"`{name}`", _codes(aliases[name]), _codes(found)) for name, found in sorted(openings.items()))
    yield from _table(("name", "also", "calls begin with"), rows)
    yield "## Reasoning"
    yield "**Inside**: an output that has no marker is reasoning from its beginning."
    families = sorted(FAMILIES.items())
    reasoning = (
        (f"`{name}`", _codes(one.starts), _codes(one.ends), "yes" if one.always else "", _codes(one.around_answer))
        for name, one in families
    )
    yield from _table(("name", "begins with", "ends with", "inside", "dropped around the answer"), reasoning)


def faults() -> Iterator[str]:
    yield from _table(("fault", "what happens"), ((f"`{kind.__name__}`", _about(kind)) for kind in get_args(Fault)))
    yield "## Rules"
    yield "What it checks after each event, and at the end."
    yield from _table(("rule", "what holds"), ((rule.value, about) for rule, about in _members(Rule)))


def protocol() -> Iterator[str]:
    yield from _table(("message", "meaning"), ((f"`{kind.__name__}`", _about(kind)) for kind in get_args(Message)))


def preset_list() -> Iterator[str]:
    rows = ((f"`{name}`", one.about, one.source, one.differs) for name, one in presets().items())
    yield from _table(("preset", "what it does", "described in", "what differs from there"), rows)


def _about(kind: type) -> str:
    """Return the first paragraph of a class's docstring."""
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def device_names() -> Iterator[str]:
    gpus = ((f"`{name}`", *(f"{number:,g}" if number else "" for number in _speeds(gpu))) for name, gpu in GPUS.items())
    yield from _table(("GPU", "memory, GB", "GB/s", "bf16 TFLOP/s", "PCIe, GB/s", "NVLink, GB/s"), gpus)
    models = (
        (f"`{name}`", f"{model.weights_gb:.1f}", f"{model.kv_bytes / 1000:,.0f}", str(model.heads))
        for name, model in MODELS.items()
    )
    yield from _table(("model", "weights in bf16, GB", "KV of a token, kB", "heads, which N divides"), models)
    for what, kind in (("GPU", Gpu), ("model", Model)):
        yield f"## Numbers of a {what}"
        yield from _table(("key", "default", "meaning"), _keys(kind))


def _keys(kind: type[Gpu] | type[Model]) -> Iterator[tuple[str, ...]]:
    """Yield the fields of a dataclass, each with its default and the comment beside it."""
    for field in fields(kind):
        default = (
            "needed" if field.default is MISSING else "" if field.default is None else f"`{field.default}`".lower()
        )
        yield f"`{field.name}`", default, _comment(kind, field.name)


def settings() -> Iterator[str]:
    usual = [setting for setting in every_setting().values() if setting.reach is not Reach.EXPERIMENT]
    for section in dict.fromkeys(setting.section for setting in usual):
        yield f"## `{section}`: {_inner(config.about(section))}" if section else "## What is served"
        rows = (_setting(setting) for setting in usual if setting.section == section)
        yield from _table(("setting", "flag", "default", ""), rows)
    yield "## For experiments"
    experiments = [setting for setting in every_setting().values() if setting.reach is Reach.EXPERIMENT]
    yield from _table(("path", "default", "presets that set it", ""), map(_experiment, experiments))


def commands() -> Iterator[str]:
    for name in command_names():
        parser = parser_of(name)
        yield from _help(_choices(parser)[name])


def _choices(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the commands of a parser by their names."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return found[0] if found else {}


def _help(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield what a command's `--help` says, and below it that of its own commands."""
    parser.formatter_class = partial(argparse.HelpFormatter, width=_WIDTH, max_help_position=34)
    yield f"## `{parser.prog}`"
    yield f"```text\n{parser.format_help().rstrip()}\n```"
    for inner in _choices(parser).values():
        yield from _help(inner)


def folders() -> Iterator[str]:
    yield draw_folders.section().rstrip()


def _inner(sentence: str) -> str:
    """Return the sentence as part of another one: names at its beginning, such as KV, keep their capitals."""
    return (sentence if sentence[:2].isupper() else sentence[0].lower() + sentence[1:]).removesuffix(".")


def _setting(setting: Setting) -> tuple[str, ...]:
    path = f"`{setting.path}`"
    flags = ", ".join(f"`{flag}`" for flag in setting.flags) if setting.path != "model" else "the first argument"
    name = f"**{path}**" if setting.reach is Reach.COMMON else path
    reloads = "; **reload**" if setting.reloads else ""
    return name, flags, _usual(setting), f"{setting.help}{_allowed(setting)}{reloads}"


def _experiment(setting: Setting) -> tuple[str, ...]:
    num_presets = sum(setting.path in preset.settings for preset in presets().values())
    return f"`{setting.path}`", _usual(setting), str(num_presets or ""), setting.help + _allowed(setting)


def _usual(setting: Setting) -> str:
    value = config.plain(setting.default)
    return "" if value is None else f"`{str(value).lower() if setting.kind is bool else value}`"


def _allowed(setting: Setting) -> str:
    """Return the values that the setting takes, if its type does not say it."""
    if setting.choices:
        return f" ({', '.join(f'`{choice}`' for choice in setting.choices)})"
    names = {"least": "{:g} or more", "above": "more than {:g}", "most": "{:g} or less"}
    bounds = [text.format(bound) for name, text in names.items() if (bound := getattr(setting, name)) is not None]
    return f" ({', '.join(bounds)})" if bounds else ""


STREAM_KEYS: Mapping[str, tuple[type, ...]] = {
    "The whole workload": (Whole,),
    **{f"`kind: {name}`": (part, *((Windows,) if name == "trace" else ())) for name, part in KINDS.items()},
    **{f"`arrivals: {name}`": (part,) for name, part in ARRIVALS.items()},
    "Every stream": (Named, StreamPromise, Turns, ClientLimits, Foresight, Span),
}


def workload_keys() -> Iterator[str]:
    for title, parts in STREAM_KEYS.items():
        yield f"## {title}"
        keys = keys_of(*parts).values()
        rows = ((f"`{key.path}`", _key_default(key), key.help.replace(FORMS, "an amount")) for key in keys)
        yield from _table(("key", "default", ""), rows) if keys else ("It has no keys.",)


def _key_default(key: Setting) -> str:
    match key.default:
        case None | "":
            return ""
        case Fixed(value=amount):
            text = f"{amount:g}"
        case Uniform(least=least, most=most):
            text = f"{least}-{most}"
        case Exponential(mean=mean, most=most):
            text = f"exp:{mean:g}:{most}"
        case LogNormal(mean=mean, deviation=deviation, most=most):
            text = f"lognormal:{mean:g}:{deviation:g}:{most}"
        case Enum(value=value):
            text = str(value)
        case float() as value:
            text = f"{value:g}"
        case value:
            text = str(value).lower()
    return f"`{text}`"


def states() -> Iterator[str]:
    yield "## At the router"
    yield "`router/lifecycle.py`:"
    yield f"```mermaid\n{lifecycle.diagram()}\n```"
    yield "## On a worker"
    yield (
        "`alignedserve/worker/step/states.py`, for both kinds of worker. A request can be cancelled in every state,"
        " which is not drawn."
    )
    yield f"```mermaid\n{worker_states.diagram()}\n```"


def _members(kind: type[Enum]) -> Iterator[tuple[Enum, str]]:
    """Yield the members of an enumeration, each with the comment beside it."""
    yield from ((member, _comment(kind, member.name)) for member in kind)


def _comment(kind: type, name: str) -> str:
    found = re.search(rf"^    {name}\b[^#\n]*#\s*(.*)$", inspect.getsource(kind), re.MULTILINE)
    return found[1] if found else ""


def _speeds(gpu: Gpu) -> tuple[float | None, ...]:
    return gpu.memory_gb, gpu.bandwidth_gb_s, gpu.tflops, gpu.pcie_gb_s, gpu.nvlink_gb_s


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *(f"| {' | '.join(row)} |" for row in cells)]
    yield "\n".join(lines)


SECTIONS_OF_PAGES: Mapping[str, Callable[[], Iterator[str]]] = {
    "api_fields": api_fields,
    "commands": commands,
    "device_names": device_names,
    "faults": faults,
    "figures": figures,
    "folders": folders,
    "metric_names": metric_names,
    "parsers": parsers,
    "preset_list": preset_list,
    "protocol": protocol,
    "settings": settings,
    "states": states,
    "workload_keys": workload_keys,
}
MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def section(name: str) -> str:
    return "\n\n".join(SECTIONS_OF_PAGES[name]())


def filled(markdown: str) -> str:
    """Return a page with each section in the place of its marker, one level below the heading that it stands under."""
    return MARKER.sub(lambda marker: re.sub("^##", "###", section(marker[1]), flags=re.MULTILINE), markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Mkdocs calls this with each page of the site."""
    return filled(markdown)


if __name__ == "__main__":
    print("\n\n".join(section(name) for name in sys.argv[1:] or SECTIONS_OF_PAGES))
