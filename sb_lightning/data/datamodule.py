"""The LightningDataModule: from a source of text to packed micro-batches, exactly resumable."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from sb_lightning._messages import explain
from sb_lightning.balance import BalancedDataLoader, SparsityAwareBatchSampler
from sb_lightning.balance.costs import GENERIC_SHAPE
from sb_lightning.balance.rank_loader import RankDataLoader
from sb_lightning.data.build import build_index
from sb_lightning.data.corpus import Corpus
from sb_lightning.data.dataset import (
    EvaluationBatchSampler,
    RankSampler,
    TokenDataset,
    collate_cell,
    split_sequences,
)
from sb_lightning.data.index import (
    TokenIndex,
    check_lengths,
    describe_report,
    find_index,
    index_name,
)
from sb_lightning.data.latency import analytic_cost, model_budget, sync_latency
from sb_lightning.data.position import AlignCheckpoint, TrainingPosition, check_on_resize
from sb_lightning.data.settings import check_evaluated_settings, check_settings
from sb_lightning.data.tokenizer import TextTokenizer, check_spec, load_tokenizer
from sb_lightning.data.trainer import check_trainer, data_parallel, max_batches, sync_data_check
from sb_lightning.latency import AnalyticCost, LatencyModel

__all__ = ["TextDataModule"]


class TextDataModule(LightningDataModule):
    """Documents as packed micro-batches, planned in whole windows (one optimizer step of all ranks).

    The corpus is tokenized once and cached. The loaders deal the sequences over the ranks themselves,
    whatever ``Trainer(use_distributed_sampler=...)`` says. Mid-epoch checkpoints resume exactly, at the first
    micro-batch of a window.

    Args:
        source: Folder of text files (one document each), a .jsonl or .parquet file (one document per line or
            row), or ``stdlib``: the source files of the running Python's standard library.
        tokenizer: ``bytes``; ``train:SIZE``, a byte-level BPE of SIZE tokens trained on the source and
            cached; or a folder or hub name for transformers' AutoTokenizer.
        max_length: Longest sequence in tokens, the end-of-document token included.
        overlong: What happens to a longer document: ``truncate``, ``split`` into sequences of their own, or
            ``drop``.
        text_field: Field (.jsonl) or column (.parquet) that holds the text.
        file_pattern: Names of the files to read from a folder, as in a shell: ``*.txt``.
        on_error: What happens on a broken, empty or non-UTF-8 document: ``raise``, or ``skip`` and count.
        validation_share: Share of the documents, by a hash of their id, that is kept for validation.
        cache_dir: Folder for tokenized corpora and trained tokenizers.
        seed: Seed of the order of the training sequences.
        policy: How the sequences of a window are dealt over ranks and micro-batches: ``latency`` evens out
            their predicted times, ``flops`` their operations, ``tokens`` their lengths; ``length`` sorts them
            by length, ``random`` deals as a shuffled DistributedSampler does.
        objective: How the ranks meet: ``ddp`` once per window, ``fsdp`` in every micro-batch.
        sequences_per_micro_batch: Sequences packed into one micro-batch, on average.
        max_tokens: Most tokens of a micro-batch, never exceeded; None: no limit.
        overflow: What happens to sequences that do not fit under ``max_tokens``: ``raise`` or ``truncate``.
        equal_counts: Give every micro-batch equally many sequences.
        tail: What happens to the short last window of an epoch: ``drop`` leaves it out, ``pad`` fills missing
            places with micro-batches that do not count, ``partial`` runs fewer micro-batches (some of two
            sequences where ``sequences_per_micro_batch`` is 1).
        on_resize: What happens when a run is resumed with another number of ranks or of micro-batches per
            step: ``raise``, or ``replan`` what is left of the epoch.
        num_workers: Processes that prepare micro-batches ahead; 0 prepares them in the training process.

    Attributes:
        vocab_size: Number of token ids, known after ``setup`` like the tokenizer itself.
        report: Counts of documents, sequences and tokens, and of what was cut or left out.
        latency: Predicts the times that ``policy: latency`` evens out: a ``LatencyTable``; ``sb fit`` sets it
            from ``latency.table``, rank zero's serves all ranks. None counts the model's operations.
        train_dataset: Training split.
        val_dataset: Validation split, also used for test and predict; None if it is empty.
    """

    def __init__(
        self,
        *,
        source: str = "stdlib",
        tokenizer: str = "bytes",
        max_length: int = 8192,
        overlong: Literal["truncate", "split", "drop"] = "truncate",
        text_field: str = "text",
        file_pattern: str = "*",
        on_error: Literal["raise", "skip"] = "raise",
        validation_share: float = 0.02,
        cache_dir: str = ".cache/sb_lightning",
        seed: int = 0,
        policy: Literal["random", "length", "tokens", "flops", "latency"] = "latency",
        objective: Literal["ddp", "fsdp"] = "ddp",
        sequences_per_micro_batch: int = 1,
        max_tokens: int | None = None,
        overflow: Literal["raise", "truncate"] = "raise",
        equal_counts: bool = False,
        tail: Literal["drop", "pad", "partial"] = "partial",
        on_resize: Literal["raise", "replan"] = "raise",
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        check_settings(
            cache_dir=cache_dir, seed=seed, validation_share=validation_share, num_workers=num_workers
        )
        check_lengths(max_length, overlong)
        check_spec(tokenizer)
        self.tokenizer_spec = tokenizer
        self.max_length = max_length
        self.overlong = overlong
        self.validation_share = validation_share
        self.cache_dir = Path(cache_dir)
        self.seed = seed
        self.policy = policy
        self.objective = objective
        self.sequences_per_micro_batch = sequences_per_micro_batch
        self.max_tokens = max_tokens
        self.overflow = overflow
        self.equal_counts = equal_counts
        self.tail = tail
        self.on_resize = check_on_resize(on_resize, "data.on_resize")
        self.num_workers = num_workers
        self.corpus = Corpus(
            source=str(source), text_field=text_field, file_pattern=file_pattern, on_error=on_error
        )
        self.latency: LatencyModel | None = None
        self._has_told = False
        self.tokenizer: TextTokenizer | None = None
        self.vocab_size = 0
        self.report: dict[str, Any] = {}
        self.train_dataset: TokenDataset | None = None
        self.val_dataset: TokenDataset | None = None
        self._position: TrainingPosition | None = None
        # A rank may have nothing to predict; train and evaluation always have equally many micro-batches.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        # Bad arguments of the sampler are found here, not after tokenizing.
        SparsityAwareBatchSampler(
            [1] * sequences_per_micro_batch,
            latency=AnalyticCost(GENERIC_SHAPE),
            **self._plan_options(),
            ranks=1,
            rank=0,
        )

    def prepare_data(self) -> None:
        """Tokenize the source into the cache unless it is there, whole; Lightning calls this on rank zero."""
        tokenizer, folder = self._tokenizer_and_folder()
        if find_index(folder, thorough=True) is None:
            self._build(tokenizer, folder)

    def setup(self, stage: str | None = None) -> None:
        """Open the cached tokens and split them; called on every rank.

        Raises:
            MisconfigurationException: The Trainer would undo the plan; the message names the setting.
            ValueError: No document is left to train on.
        """
        if self.trainer is not None:
            check_trainer(self.trainer)
        if self.train_dataset is None:
            self._open()
        if stage == "fit" and self.trainer is not None:
            assert self.train_dataset is not None
            data = {
                "data": self.train_dataset.index.fingerprint,
                "validation_share": f"{self.validation_share}",
            }
            sync_data_check(self.trainer, data)
            self.latency = sync_latency(self.trainer, self.latency)
            self._position = TrainingPosition(self.trainer, data, self._settings(), on_resize=self.on_resize)
            AlignCheckpoint.add_to(self.trainer, type(self).__qualname__, self._position)
            # Compares the plans of the ranks; the position stays here.
            from sb_lightning.callbacks import BalancedSampling

            BalancedSampling.add_to(self.trainer, self.on_resize)

    def train_dataloader(self) -> BalancedDataLoader:
        """Return the loader of this rank's training micro-batches."""
        assert self.train_dataset is not None, "setup comes first"
        trainer, data = self.trainer, self.train_dataset
        ranks, rank = data_parallel(trainer)
        accumulate = 1 if trainer is None else trainer.accumulate_grad_batches
        module = None if trainer is None else trainer.lightning_module
        latency = self.latency
        if latency is None:
            latency = analytic_cost(module, vocab_size=self.vocab_size, max_length=self.max_length)
        build = partial(
            SparsityAwareBatchSampler,
            data.lengths,
            data.target_tokens,
            ranks=ranks,
            rank=rank,
            accumulate=accumulate,
            latency=latency,
            budget=model_budget(module),
            sequence_ids=data.sequence_ids,
            **self._plan_options(),
        )
        sampler = build()
        if len(data) < sampler.window_size:
            rank_zero_warn(
                f"the {len(data)} training sequences are fewer than one window of {ranks} ranks x "
                f"trainer.accumulate_grad_batches={accumulate} x data.sequences_per_micro_batch="
                f"{self.sequences_per_micro_batch}: each epoch is one short step."
            )
        if self.policy == "latency" and not self._has_told:
            self._has_told = True
            rank_zero_info(f"Micro-batches are balanced by predicted times: {latency.label}.")
        if trainer is None:
            return BalancedDataLoader(data, batch_sampler=sampler, **self._loader_options())
        sampler = build(max_batches=max_batches(sampler.num_batches, trainer.limit_train_batches))
        begin = None
        if self._position is not None:
            self._position.attach(sampler)
            begin = partial(self._position.begin, sampler)
        return BalancedDataLoader(data, batch_sampler=sampler, begin=begin, **self._loader_options())

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the loader of this rank's share of the validation split; an empty list if it is empty.

        Raises:
            ValueError: Validation or test was asked for and the split is empty.
        """
        data = self._evaluation_split()
        if data is None:
            # `setup` has said so, or it was asked for.
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
            return []
        ranks, rank = data_parallel(self.trainer)
        sampler = EvaluationBatchSampler(
            data.lengths, ranks=ranks, rank=rank, sequences_per_micro_batch=self.sequences_per_micro_batch
        )
        return RankDataLoader(data, batch_sampler=sampler, **self._loader_options())

    def test_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return what :meth:`val_dataloader` returns: there is one held-out split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the loader of this rank's held-out sequences, one per micro-batch, none repeated.

        Raises:
            ValueError: The held-out split is empty.
        """
        data = self._evaluation_split()
        if data is None:
            return []
        ranks, rank = data_parallel(self.trainer)
        sampler = RankSampler(len(data), ranks=ranks, rank=rank)
        return DataLoader(data, sampler=sampler, batch_size=1, **self._loader_options())

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands in the data: the same on every rank, plain numbers and strings."""
        return {} if self._position is None else self._position.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position in ``fit``; otherwise compare the settings with the checkpoint's.

        Raises:
            ValueError: A model is evaluated with another tokenizer than it was trained with.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            if "settings" in state_dict:
                check_evaluated_settings(state_dict["settings"], self._settings())
        elif self._position is not None:
            self._position.load_state_dict(state_dict)

    def _open(self) -> None:
        tokenizer, folder = self._tokenizer_and_folder()
        index = find_index(folder) or self._build(tokenizer, folder)
        splits = split_sequences(index, self.validation_share)
        if len(splits["train"]) == 0:
            raise ValueError(
                explain(
                    f"all {len(index)} sequences of data.source fall into the validation split",
                    "there is nothing to train on",
                    f"lower data.validation_share (now {self.validation_share}) or use more documents",
                )
            )
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.train_dataset = TokenDataset(index, splits["train"])
        self.val_dataset = TokenDataset(index, splits["val"]) if len(splits["val"]) else None
        self.report = {
            **index.report,
            "sequences_train": len(splits["train"]),
            "sequences_val": len(splits["val"]),
        }
        rank_zero_info(describe_report(self.report))
        if self.val_dataset is None and self.validation_share > 0:
            rank_zero_warn(
                f"data.validation_share={self.validation_share} keeps none of "
                f"{index.report['documents']} documents for validation; raise it to see a validation loss."
            )

    def _tokenizer_and_folder(self) -> tuple[TextTokenizer, Path]:
        tokenizer, stamp = load_tokenizer(self.tokenizer_spec, self.corpus, self.cache_dir)
        name = index_name(self.corpus, stamp, max_length=self.max_length, overlong=self.overlong)
        return tokenizer, self.cache_dir / name

    def _build(self, tokenizer: TextTokenizer, folder: Path) -> TokenIndex:
        return build_index(self.corpus, tokenizer, folder, max_length=self.max_length, overlong=self.overlong)

    def _evaluation_split(self) -> TokenDataset | None:
        assert self.train_dataset is not None, "setup comes first"
        wanted = (TrainerFn.VALIDATING, TrainerFn.TESTING, TrainerFn.PREDICTING)
        if self.val_dataset is None and self.trainer is not None and self.trainer.state.fn in wanted:
            raise ValueError(
                explain(
                    f"data.validation_share={self.validation_share} keeps none of "
                    f"{self.report['documents']} documents for validation",
                    f"there is nothing to {self.trainer.state.fn.value}",
                    "raise data.validation_share or use more documents",
                )
            )
        return self.val_dataset

    def _settings(self) -> dict[str, Any]:
        """Return what the sequences depend on, as a checkpoint keeps it."""
        assert self.tokenizer is not None, "setup comes first"
        return {
            "source": self.corpus.source,
            "text_field": self.corpus.text_field,
            "file_pattern": self.corpus.file_pattern,
            "on_error": self.corpus.on_error,
            "tokenizer": self.tokenizer_spec,
            "tokenizer_content": self.tokenizer.fingerprint,
            "max_length": self.max_length,
            "overlong": self.overlong,
            "validation_share": self.validation_share,
        }

    def _plan_options(self) -> dict[str, Any]:
        return {
            "sequences_per_micro_batch": self.sequences_per_micro_batch,
            "policy": self.policy,
            "objective": self.objective,
            "max_tokens": self.max_tokens,
            "overflow": self.overflow,
            "equal_counts": self.equal_counts,
            "tail": self.tail,
            "seed": self.seed,
        }

    def _loader_options(self) -> dict[str, Any]:
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return {"num_workers": self.num_workers, "collate_fn": collate_cell, "pin_memory": on_gpu}
