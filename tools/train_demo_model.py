"""Train the demo model: `python tools/train_demo_model.py`.

The script makes conversations, trains the tokenizer and the model on them, and writes a Hugging Face folder.
The seed and the step's number decide the data of a step, so a run that was stopped continues from its last
checkpoint with the same result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo_batches import Batch, Encoder, batches
from demo_corpus import KINDS, Draw, Sample, Split, sample
from demo_induction import start_with_induction
from demo_tokenizer import BEGIN, END, MAX_POSITIONS, PAD, save_tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER_SAMPLES = 20_000
FINGERPRINT_SAMPLES = 2_000


@dataclass(frozen=True)
class Settings:
    seed: int
    steps: int
    samples_per_step: int
    muon_rate: float
    adam_rate: float
    warmup: int = 50
    tokens_per_pass: int = 4096  # so that this model's activations fit into a CPU's caches


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    begin, end, pad = tokenizer.convert_tokens_to_ids([BEGIN, END, PAD])
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,  # as wide as hidden_size, so that the hybrid cache can be tried with this model
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=begin,
        eos_token_id=end,
        pad_token_id=pad,
    )


def masked_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return plain attention in bf16: on CPUs at these lengths 3 to 4 times as fast as torch's fused kernel."""
    batch, heads, length, width = query.shape
    query, key, value = (x.reshape(batch * heads, length, width) for x in (query, key, value))
    scores = torch.baddbmm(attention_mask.view(-1, length, length), query, key.transpose(1, 2), alpha=scaling)
    out = torch.bmm(scores.softmax(-1, dtype=scores.dtype), value)
    return out.view(batch, heads, length, width).transpose(1, 2).contiguous(), None


AttentionInterface.register("masked_bf16", masked_attention)


def training_samples(settings: Settings, step: int) -> list[Sample]:
    numbers = range(settings.samples_per_step)
    return [sample(Draw(f"{settings.seed}/{step}/{number}", Split.TRAIN)) for number in numbers]


def corpus_texts(seed: int) -> Iterator[str]:
    for number in range(TOKENIZER_SAMPLES):
        for turn in sample(Draw(f"{seed}/tokenizer/{number}", Split.TRAIN)).turns:
            yield turn.user
            yield turn.assistant


def corpus_fingerprint(seed: int) -> str:
    """Return a digest of the corpus's first conversations, which identifies the corpus."""
    digest = hashlib.sha256()
    for number in range(FINGERPRINT_SAMPLES):
        digest.update(repr(sample(Draw(f"{seed}/fingerprint/{number}", Split.TRAIN))).encode())
    return digest.hexdigest()


def answer_logits(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Return the logits at the answers' positions only: a third of all positions, an eighth of the arithmetic."""
    heads = model.config.num_attention_heads
    mask = batch.mask.expand(-1, heads, -1, -1).contiguous()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.inputs, attention_mask=mask, use_cache=False).last_hidden_state
        logits: torch.Tensor = model.lm_head(hidden.flatten(0, 1)[batch.sources])
    return logits.float()


class Trainer:
    """The model, its optimisers and the number of the next step."""

    def __init__(self, settings: Settings, tokenizer: PreTrainedTokenizerFast) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.encoder = Encoder(tokenizer)
        self.model = LlamaForCausalLM(model_config(tokenizer))
        start_with_induction(self.model, settings.seed)
        self.model.set_attn_implementation("masked_bf16")
        inner = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        outer = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.optimisers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(inner, lr=settings.muon_rate, weight_decay=0.01),
            torch.optim.AdamW(outer, lr=settings.adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self.step = 0

    def train_step(self) -> float:
        """Train a step on its own data, and return the mean loss of an answer token."""
        encoded = self.encoder(training_samples(self.settings, self.step))
        parts = list(batches(encoded, self.settings.tokens_per_pass, self.encoder.pad))
        whole = sum(float(part.weights.sum()) for part in parts)
        total = 0.0
        for part in parts:
            losses = F.cross_entropy(answer_logits(self.model, part), part.targets, reduction="none")
            loss = (losses * part.weights).sum() / whole
            loss.backward()
            total += loss.item()
        self._update()
        self.step += 1
        return total

    def _update(self) -> None:
        settings = self.settings
        rate = min(1.0, (self.step + 1) / settings.warmup) * (1 - self.step / settings.steps)
        for optimiser, peak in zip(self.optimisers, (settings.muon_rate, settings.adam_rate), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * rate
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        optimisers = [optimiser.state_dict() for optimiser in self.optimisers]
        return {"step": self.step, "model": self.model.state_dict(), "optimisers": optimisers}

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)

    @torch.no_grad()
    def answered(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the share of right answers by kind.

        Greedy decoding writes an answer if each token is the likeliest after the right tokens before it, so one pass
        is enough.
        """
        right: dict[str, list[bool]] = defaultdict(list)
        for part in batches(self.encoder(samples), self.settings.tokens_per_pass, self.encoder.pad):
            wrong = part.owners[answer_logits(self.model, part).argmax(-1) != part.targets]
            for row, kind in enumerate(part.kinds):
                right[kind].append(not bool((wrong == row).any()))
        return {kind: sum(marks) / len(marks) for kind, marks in right.items()}


def held_out_samples(seed: int, per_kind: int) -> list[Sample]:
    """Return held-out prompts to watch the training with; the evaluation uses other prompts."""
    numbers = range(per_kind)
    return [sample(Draw(f"{seed}/watch/{kind}/{n}", Split.HELD_OUT), kind) for kind in KINDS for n in numbers]


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings, folder: Path) -> None:
    """Write a standard Hugging Face folder: the weights in bf16, and a note on how they were made."""
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(model.state_dict())
    stored.to(torch.bfloat16)
    config = model.config
    stored.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=False,
        max_length=MAX_POSITIONS,
    )
    stored.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    note = {
        "settings": vars(settings),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "corpus": corpus_fingerprint(settings.seed),
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    }
    (folder / "training.json").write_text(json.dumps(note, indent=2) + "\n")


def write_whole(state: dict[str, Any], path: Path) -> None:
    """Write the checkpoint as a whole: if the run is stopped meanwhile, the file before it stays."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def train(settings: Settings, out: Path, work: Path, checkpoint_s: float, watch_steps: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    print("tokenizer ...", flush=True)
    tokenizer = train_tokenizer(corpus_texts(settings.seed))
    trainer = Trainer(settings, tokenizer)
    print(f"{trainer.model.num_parameters():,} parameters, {len(tokenizer):,} tokens", flush=True)
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state.pop("settings") != vars(settings):
            raise SystemExit(f"{checkpoint} belongs to a run with other settings: remove it or choose another --work")
        trainer.restore(state)
        print(f"resumed at step {trainer.step}", flush=True)
    watched = held_out_samples(settings.seed, per_kind=24)
    started_at, saved_at, first = time.monotonic(), time.monotonic(), trainer.step
    losses: list[float] = []
    while trainer.step < settings.steps:
        losses.append(trainer.train_step())
        now = time.monotonic()
        if trainer.step % 20 == 0 or trainer.step == settings.steps:
            left_s = (now - started_at) / (trainer.step - first) * (settings.steps - trainer.step)
            mean = sum(losses) / len(losses)
            print(f"step {trainer.step}/{settings.steps}  loss {mean:.4f}  {left_s / 60:.1f} min left", flush=True)
            losses.clear()
        if watch_steps and (trainer.step % watch_steps == 0 or trainer.step == settings.steps):
            shares = trainer.answered(watched)
            print("  held-out " + "  ".join(f"{kind} {share:.2f}" for kind, share in shares.items()), flush=True)
        if now - saved_at > checkpoint_s:
            write_whole({"settings": vars(settings), **trainer.state()}, checkpoint)
            saved_at = now
    save_model(trainer.model, tokenizer, settings, out)
    checkpoint.unlink(missing_ok=True)
    print(f"wrote {out}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "alignedserve" / "demo_model", help="folder to write")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "demo_model", help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3400)
    parser.add_argument("--samples-per-step", type=int, default=52)
    parser.add_argument("--muon-rate", type=float, default=0.015)
    parser.add_argument("--adam-rate", type=float, default=0.002)
    parser.add_argument(
        "--threads", type=int, default=2, help="another number sums in another order, and gives other weights"
    )
    parser.add_argument("--checkpoint-s", type=float, default=60.0, help="seconds between checkpoints")
    parser.add_argument(
        "--watch-steps", type=int, default=200, help="steps between checks of held-out answers; 0: never"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settings = Settings(given.seed, given.steps, given.samples_per_step, given.muon_rate, given.adam_rate)
    train(settings, given.out, given.work, given.checkpoint_s, given.watch_steps)


if __name__ == "__main__":
    main()
