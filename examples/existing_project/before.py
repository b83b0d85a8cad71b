"""An ordinary Lightning project: a small Llama learns the source files of Python's own standard library.

Nothing here has heard of sb_lightning; `after.py` is the same project with three lines more. It trains by
`python examples/existing_project/before.py`.
"""

import json
import math
import re
import zlib
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

PACKAGES = ("asyncio", "concurrent", "email", "http", "json", "logging", "xml")
VOCABULARY, MAX_TOKENS, ACCUMULATE = 1024, 4096, 4


class SourceFiles(Dataset):
    """Source files as words, each of which is a number by its hash."""

    def __init__(self, paths: list[Path]):
        texts = [re.findall(r"\w+|[^\w\s]", path.read_text(encoding="utf-8"))[:MAX_TOKENS] for path in paths]
        numbers = [[zlib.crc32(word.encode()) % VOCABULARY for word in words] for words in texts]
        self.documents = [torch.tensor(document) for document in numbers if len(document) > 16]
        self.lengths = [len(document) for document in self.documents]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.documents[index]


def pad(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Padded rows, as a Hugging Face model takes them."""
    masks = [torch.ones_like(document) for document in documents]
    return {
        "input_ids": pad_sequence(documents, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
        "labels": pad_sequence(documents, batch_first=True, padding_value=-100),
    }


class SourceData(LightningDataModule):
    """Every eighth file is held out."""

    def setup(self, stage: str) -> None:
        library = Path(json.__file__).parents[1]
        paths = sorted(path for package in PACKAGES for path in (library / package).rglob("*.py"))
        self.train_files = SourceFiles([path for i, path in enumerate(paths) if i % 8])
        self.val_files = SourceFiles(paths[::8])

    def train_dataloader(self) -> DataLoader:
        loader = DataLoader(self.train_files, batch_size=1, shuffle=True, collate_fn=pad)
        rank_zero_info(f"{len(self.train_files)} files, {sum(self.train_files.lengths):,} tokens")
        return loader

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_files, batch_size=4, collate_fn=pad)


class SourceModel(LightningModule):
    """A Llama of two layers with random weights."""

    def __init__(self, learning_rate: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_TOKENS,
        )
        self.llama = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.llama(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.llama(**batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 4, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_trainer(*more_callbacks, **settings) -> Trainer:
    callbacks = [EarlyStopping("val_loss", patience=2), *more_callbacks]
    defaults = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 1,
        "accumulate_grad_batches": ACCUMULATE,
        "callbacks": callbacks,
        "logger": False,
        "enable_checkpointing": False,
    }
    return Trainer(**{**defaults, **settings})


if __name__ == "__main__":
    seed_everything(0)
    make_trainer().fit(SourceModel(), SourceData())
