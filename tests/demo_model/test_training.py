"""Tests that training is repeatable and survives `kill -9`, and that packing conversations into rows changes
nothing."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from demo_batches import Encoder, batches
from demo_corpus import KINDS, Draw, Sample, Split, Turn, sample
from train_demo_model import Settings, Trainer, answer_logits, main

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "alignedserve" / "demo_model"
SETTINGS = Settings(seed=1, steps=4, samples_per_step=6, muon_rate=0.02, adam_rate=0.004)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER)


def tool(folder: Path, *options: str) -> list[str]:
    """Return the tool and its arguments for a run of three tiny steps."""
    size = ["--steps", "3", "--samples-per-step", "2", "--checkpoint-s", "0", "--watch-steps", "0"]
    places = ["--out", str(folder / "model"), "--work", str(folder / "work")]
    return [str(ROOT / "tools" / "train_demo_model.py"), *size, *places, *options]


def run(folder: Path, *options: str) -> None:
    """Run the tool in this process: a new one takes six seconds to import torch and transformers."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", tool(folder, *options))
        try:
            main()
        finally:
            torch.set_num_threads(threads)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    subprocess.run([sys.executable, *tool(folder)], check=True, timeout=600)
    return folder


def test_one_seed_trains_one_model(trained: Path, tmp_path: Path) -> None:
    run(tmp_path)
    assert digest(tmp_path) == digest(trained)


def test_another_seed_trains_another_model(trained: Path, tmp_path: Path) -> None:
    run(tmp_path, "--seed", "2")
    assert digest(tmp_path) != digest(trained)


KILLED_AT_ITS_CHECKPOINT = """
import os, runpy, signal, sys
from pathlib import Path
replace = Path.replace
def replace_and_die(self, to):
    replace(self, to)
    os.kill(os.getpid(), signal.SIGKILL)
Path.replace = replace_and_die
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_killed_run_goes_on_where_it_was(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED_AT_ITS_CHECKPOINT, *tool(tmp_path)], timeout=600)
    assert killed.returncode == -signal.SIGKILL
    checkpoint = tmp_path / "work" / "checkpoint.pt"
    assert checkpoint.exists()
    assert not (tmp_path / "model").exists()
    run(tmp_path)
    assert "resumed at step" in capsys.readouterr().out
    assert digest(tmp_path) == digest(trained)
    assert not checkpoint.exists()


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    torch.save({"settings": vars(replace(SETTINGS, seed=9))}, tmp_path / "checkpoint.pt")
    (tmp_path / "work").mkdir()
    (tmp_path / "checkpoint.pt").rename(tmp_path / "work" / "checkpoint.pt")
    with pytest.raises(SystemExit, match="belongs to a run with other settings"):  # Python prints it, and ends with 1
        run(tmp_path)


def test_the_folder_holds_what_was_trained(trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    assert model.dtype is torch.bfloat16
    assert sorted(path.name for path in (trained / "model").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]


def test_training_reads_what_the_chat_template_writes(tokenizer: PreTrainedTokenizerFast, many: int) -> None:
    encode = Encoder(tokenizer)
    samples = [sample(Draw(number, Split.TRAIN)) for number in range(many)]
    for conversation, encoded in zip(samples, encode(samples), strict=True):
        messages = [*conversation.messages, {"role": "assistant", "content": conversation.answer}]
        assert encoded.tokens == tokenizer.apply_chat_template(messages, return_dict=False)
        written = [tokenizer.decode([encoded.tokens[place] for place in answer]) for answer in encoded.answers]
        assert written == [f"{turn.assistant}<|end|>" for turn in conversation.turns]


def test_every_answer_is_learned_once_and_weighed_by_its_length(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = Encoder(tokenizer)([sample(Draw(number, Split.TRAIN)) for number in range(300)])
    parts = list(batches(encoded, most_tokens=4096, pad=0))
    learned = sorted(token for part in parts for token in part.targets[part.weights > 0].tolist())
    assert learned == sorted(
        sample.tokens[place] for sample in encoded for answer in sample.answers for place in answer
    )
    weight = sum(float(part.weights.sum()) for part in parts)
    assert weight == pytest.approx(sum(len(answer) ** 0.5 for sample in encoded for answer in sample.answers), rel=1e-4)


def test_conversations_in_one_row_do_not_see_each_other(tokenizer: PreTrainedTokenizerFast) -> None:
    def learned(question: str) -> torch.Tensor:
        samples = [
            Sample("a", (Turn("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9"),)),
            Sample("b", (Turn(question, "o k"),)),
        ]
        (batch,) = batches(encode(samples), most_tokens=4096, pad=encode.pad)
        assert batch.inputs.shape[1] == 256
        rows = batch.owners == batch.kinds.index("a")
        with torch.no_grad():
            return answer_logits(trainer.model, batch)[rows & (batch.weights > 0)]

    trainer, encode = Trainer(SETTINGS, tokenizer), Encoder(tokenizer)
    assert torch.equal(learned("Spell ok"), learned("Spill it"))


def test_the_training_network_is_the_model_that_transformers_runs(tokenizer: PreTrainedTokenizerFast) -> None:
    """The comparison uses the trained weights, which are less sharp than the weights at the start of training."""
    trainer = Trainer(SETTINGS, tokenizer)
    trained = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    trainer.model.load_state_dict(trained.state_dict())
    (encoded,) = trainer.encoder([sample(Draw(1, Split.TRAIN), "story")])
    (batch,) = batches([encoded], most_tokens=4096, pad=trainer.encoder.pad)
    with torch.no_grad():
        ours = answer_logits(trainer.model, batch)[batch.weights > 0].softmax(-1)
        probabilities = trained(torch.tensor([encoded.tokens])).logits[0]
        probabilities = probabilities[
            torch.tensor([place - 1 for answer in encoded.answers for place in answer])
        ].softmax(-1)
    assert (ours - probabilities).abs().max() < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_no_conversation_is_longer_than_the_model(tokenizer: PreTrainedTokenizerFast, kind: str, many: int) -> None:
    samples = [sample(Draw(number, split), kind) for split in Split for number in range(many // 4)]
    assert max(len(sample.tokens) for sample in Encoder(tokenizer)(samples)) <= 2048
