"""Measure how far our next tokens are from those of transformers in fp32 with the same weights, over real text.

    python -m lab.benchmarks.accuracy                       # SmolLM2, on each instruction set of this CPU: half an hour
    python -m lab.benchmarks.accuracy FILE.gguf --sets avx512vnni,avx512bf16 --only "GGUF,int4"
    python -m lab.benchmarks.accuracy --amx --tokens 48         # AMX's code too, on tiles in plain C++: slow
    python -m lab.benchmarks.accuracy --page FILE.jsonl         # no run: printed lines become the tables of two pages

The text is a chat and some paragraphs: prose, code, a letter, German. A figure is the Kullback-Leibler divergence of
the distribution of the next token, its mean and its most over all tokens, or the share of tokens with the same best.
The weights are the model's, expanded to bf16, in the forms that other tools would store, and the GGUF file as it is;
16-bit numbers are bf16 unless a form says otherwise. Each form is compared with its own weights expanded; what is
quantised while loading, with the original too. The baseline is transformers in bf16. The exit status is 1 if a goal is
missed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from alignedserve.architectures.gguf.places import Kind
from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.architectures.model_source import cache_directory, resolve
from alignedserve.architectures.named_models import NAMED, fetch_named
from alignedserve.architectures.quantization import Quantization
from alignedserve.engine.calibration import read_plain
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.library import Library, usable_sets
from alignedserve.kernels.native.kernels import Native
from alignedserve.lab.benchmarks.common.models import expand
from alignedserve.lab.benchmarks.common.one_pass import Divergence, OnePass, divergence
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.text.text_model import TextModel
from tests.gguf_files import write_tokenizer, written
from tests.kernels.emulated_tiles import with_emulated_tiles
from tests.quantised_folders import PUBLISHED, quantised_folder

TEXT = Path(__file__).parent / "data" / "real_text.txt"
QUESTION = "Why is the sky blue in the daytime, and red in the evening? Answer in three sentences."
PAGE = Path(__file__).resolve().parents[2] / "tests" / "engine" / "families.md"
CORNER = "nats; same best token"  # of the table there
GGUF, TORCH, AMX = ".gguf", "torch", "amx"
PUBLISHED_FILE = "the file"
MEAN, MOST, SAME = "mean divergence", "most", "same best token"
MOST_MEAN, LEAST_SAME, POINTS = 0.004, 0.97, 0.02  # from the same weights expanded
EXACT = 1e-6  # of fp32
OF_ORIGINAL = {Quantization.INT8: 0.003, Quantization.INT4: 0.03}  # mean divergence from the weights before
OF_TRANSFORMERS = 1.5  # times its own divergence in the same type
ROUNDS_ACTIVATIONS = {"w8a8"}  # so the format says: the expanded weights alone are no measure


# --- What is measured


def logits_of(network: Any, tokens: tuple[int, ...]) -> Tensor:
    """Return transformers' logits of every token."""
    with torch.inference_mode():
        found: Tensor = network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return found.float()


@dataclass(frozen=True)
class ModelForm:
    """A way to keep weights and KV, and the logits that it is compared with."""

    folder: Path
    expanded: Tensor  # in fp32 of the numbers that the form stands for
    goal: float | None = MOST_MEAN  # of the mean divergence from them
    dtype: torch.dtype = torch.bfloat16
    quantization: Quantization = Quantization.NONE
    kv_dtype: KvDtype = KvDtype.AUTO
    original: Tensor | None = None  # of the weights before they were quantised
    squares: Mapping[str, Tensor] = field(default_factory=dict)  # of layers' inputs, by which they are quantised

    def logits(self, kernels: Kernels, tokens: tuple[int, ...]) -> Tensor:
        return OnePass(self.folder, self.dtype, kernels, self.quantization, self.kv_dtype, self.squares)(tokens)


# --- The model in every form


@dataclass(frozen=True)
class ReferenceModel:
    """A published model. Its other forms are written to the folder `scratch`."""

    name: str
    source: Path  # a folder, or a GGUF file
    scratch: Path
    most_tokens: int | None = None  # of the text; all by default

    @cached_property
    def resolved(self) -> Path:
        return resolve(str(self.source), str(self.scratch / "cache"))

    @cached_property
    def network(self) -> Any:
        """Return the model in transformers, in fp32: it takes ten seconds to read from a GGUF file."""
        return published(self.source)

    @cached_property
    def plain(self) -> Path:
        """Write the weights as a folder of bf16."""
        folder = self.scratch / "plain"
        expand(self.network, folder, torch.bfloat16)
        self._copy_tokenizer(folder)
        return folder

    @cached_property
    def exact(self) -> Tensor:
        """Return the logits of the weights in bf16, computed in fp32."""
        return logits_of(published(self.plain), self.tokens)

    @cached_property
    def rounded(self) -> Divergence:
        """Return how far transformers is from them in bf16: what rounding costs, whoever computes."""
        return divergence(self.exact, logits_of(published(self.plain, torch.bfloat16), self.tokens))

    @property
    def least_same(self) -> float:
        """Return the share of tokens that must keep their best: fewer where rounding alone changes as many."""
        return min(LEAST_SAME, self.rounded.same - POINTS)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens of a chat and of the text."""
        text = TextModel.load(self.resolved)
        chat = text.chat_ids([{"role": "user", "content": QUESTION}])
        tokens = (*chat, *text.prompt_ids(TEXT.read_text(encoding="utf-8"), with_special=False))
        return tokens[: self.most_tokens]

    def stored(self, form: str) -> tuple[Path, Any]:
        """Return the model as another tool stores it, and the same numbers in transformers."""
        folder = self.scratch / form.replace(" ", "-")
        network = quantised_folder(self.plain, folder, PUBLISHED[form])
        self._copy_tokenizer(folder)
        return folder, network

    def gguf(self, kind: Kind) -> tuple[Path, Any]:
        """Return the model as a GGUF file of one kind, its table of tokens in 8 bits, and the same in transformers."""
        path = self.scratch / f"{kind.name}{GGUF}"

        def kind_of(tensor: str) -> Kind:
            return Kind.Q8_0 if tensor.startswith(("token_embd", "output.")) else kind

        tokenizer = partial(write_tokenizer, folder=self.plain)
        made = written(self.plain, path, "llama", kind_of, tokenizer=tokenizer)
        return resolve(str(path), str(self.scratch / "cache")), made.reference

    def _copy_tokenizer(self, folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            copyfile(self.resolved / name, folder / name)


def published(source: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model folder or a GGUF file in transformers."""
    from transformers import AutoModelForCausalLM

    file = {"gguf_file": source.name} if source.suffix == GGUF else {}
    return AutoModelForCausalLM.from_pretrained(source.parent if file else source, dtype=dtype, **file).eval()


def _narrow(dtype: torch.dtype, _: str, model: ReferenceModel) -> ModelForm:
    return ModelForm(model.plain, model.exact, OF_TRANSFORMERS * model.rounded.mean, dtype)


def _quantised(quantization: Quantization, _: str, model: ReferenceModel) -> ModelForm:
    """Compare with the expanded weights in our torch reference, whose fp32 is transformers' to the last digits."""
    squares = read_plain(model.plain, torch.bfloat16).squares  # as a worker does
    in_fp32 = ModelForm(model.plain, Tensor(), None, torch.float32, quantization, squares=squares)
    exact = in_fp32.logits(Reference(), model.tokens)
    return ModelForm(model.plain, exact, quantization=quantization, original=model.exact, squares=squares)


def _gguf(kind: Kind, _: str, model: ReferenceModel) -> ModelForm:
    folder, network = model.gguf(kind)
    return ModelForm(folder, logits_of(network, model.tokens))


def _stored(name: str, model: ReferenceModel) -> ModelForm:
    folder, network = model.stored(name)
    return ModelForm(folder, logits_of(network, model.tokens), None if name in ROUNDS_ACTIVATIONS else MOST_MEAN)


FORMS: dict[str, Callable[[str, ReferenceModel], ModelForm]] = {
    "fp32": lambda _, model: ModelForm(model.plain, model.exact, EXACT, torch.float32),
    "fp16": partial(_narrow, torch.float16),
    "bf16": partial(_narrow, torch.bfloat16),
    "KV int8": lambda _, model: ModelForm(model.plain, model.exact, kv_dtype=KvDtype.INT8),
    "int8": partial(_quantised, Quantization.INT8),
    "int4": partial(_quantised, Quantization.INT4),
    PUBLISHED_FILE: lambda _, model: ModelForm(model.resolved, logits_of(model.network, model.tokens)),
    **{f"GGUF {kind.name}": partial(_gguf, kind) for kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1)},
    **dict.fromkeys(PUBLISHED, _stored),
}


# --- Figures


def compare(model: ReferenceModel, wanted: Sequence[str], kernels: Mapping[str, Kernels]) -> None:
    for name in wanted:
        if name == PUBLISHED_FILE and model.source.suffix != GGUF:
            continue
        form = FORMS[name](name, model)
        for isa, made in kernels.items():
            logits = form.logits(made, model.tokens)
            least = None if form.goal is None else model.least_same
            _report(f"{model.name}, {name}, {isa}", divergence(form.expanded, logits), model.rounded, form.goal, least)
            if form.original is not None:
                far, goal = divergence(form.original, logits), OF_ORIGINAL[form.quantization]
                _report(f"{model.name}, {name} beside the original, {isa}", far, model.rounded, goal, None)


def _report(name: str, found: Divergence, rounded: Divergence, goal: float | None, least_same: float | None) -> None:
    report(f"{name}, {MEAN}", found.mean, "nats", baseline=rounded.mean, goal=goal)
    report(f"{name}, {MOST}", found.most, "nats", baseline=rounded.most)
    report(f"{name}, {SAME}", found.same, "1", baseline=rounded.same, goal=least_same, at_least=True)


def table(lines: Sequence[str]) -> str:
    """Return printed figures as a table: a row for each form, a column for each instruction set."""
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for line in map(json.loads, lines):
        form, isa, figure = line["name"].rsplit(", ", 2)
        figures.setdefault(form.partition(", ")[2], {}).setdefault(isa, {})[figure] = line
    columns = list(dict.fromkeys(isa for row in figures.values() for isa in row))
    rows = [[CORNER, *columns], ["---"] * (len(columns) + 1)]
    for form, row in figures.items():
        rows.append([form, *(_cell(row[isa]) if isa in row else "" for isa in columns)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def refresh(page: Path, made: str) -> None:
    """Write the table in place of the one that the page has."""
    text = page.read_text(encoding="utf-8")
    changed, count = re.subn(rf"^\| {CORNER} \|.*\n(?:\|.*\n)*", lambda _: made, text, flags=re.MULTILINE)
    assert count == 1, f"{page} has {count} tables of divergence"
    page.write_text(changed, encoding="utf-8")


def _cell(figures: Mapping[str, Any]) -> str:
    shown = f"{figures[MEAN]['value']:.4f}; {100 * figures[SAME]['value']:.1f} %"
    is_missed = False in (figures[MEAN]["met"], figures[SAME]["met"])
    return f"**{shown}**" if is_missed else shown


def kernels_of(sets: Sequence[str], emulated: Path | None) -> dict[str, Kernels]:
    """Return kernels by the name of their instruction set."""
    made: dict[str, Kernels] = {isa: Reference() if isa == TORCH else Native(Library(isa)) for isa in sets}
    return made if emulated is None else made | {AMX: Native(Library(AMX, emulated))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    every = [TORCH, *usable_sets()]
    parser.add_argument("model", nargs="?", default="smollm2", help="a model by name, a folder, or a GGUF file")
    parser.add_argument("--only", type=several(str, FORMS), default=list(FORMS), help="forms")
    parser.add_argument("--sets", type=several(str, every), default=every, help="instruction sets, and torch")
    parser.add_argument("--tokens", type=int, help="measure this many tokens of the text (default: all)")
    parser.add_argument("--amx", action="store_true", help="compile AMX's code for tiles in plain C++, and run it too")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the table of families.md from these figures, and end"
    )
    args = parser.parse_args(arguments)
    if args.page:
        refresh(PAGE, table(args.page.read_text(encoding="utf-8").splitlines()))
        return
    source = fetch_named(args.model, cache_directory(None)) if args.model in NAMED else Path(args.model)
    if not source.exists():
        parser.error(f"{source} is not there: name a folder, a GGUF file, or one of {', '.join(NAMED)}")
    with TemporaryDirectory() as scratch:
        emulated = with_emulated_tiles(Path(scratch)) if args.amx else None
        model = ReferenceModel(args.model if args.model in NAMED else source.stem, source, Path(scratch), args.tokens)
        compare(model, args.only, kernels_of(args.sets, emulated))
    sys.exit(status())


if __name__ == "__main__":
    main()
