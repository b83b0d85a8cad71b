"""From files to packed micro-batches: corpus, tokenizer, index of lengths, collator, LightningDataModule."""

from sb_lightning.data.collator import IGNORED_LABEL, pack_sequences
from sb_lightning.data.corpus import Corpus, Document
from sb_lightning.data.datamodule import TextDataModule
from sb_lightning.data.dataset import TokenDataset
from sb_lightning.data.foreign_loader import balance_loader
from sb_lightning.data.index import TokenIndex
from sb_lightning.data.tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "IGNORED_LABEL",
    "Corpus",
    "Document",
    "TextDataModule",
    "TextTokenizer",
    "TokenDataset",
    "TokenIndex",
    "balance_loader",
    "load_tokenizer",
    "pack_sequences",
]
