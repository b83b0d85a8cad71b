"""`sb fit|validate|test|predict`: LightningCLI with this project's defaults."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from sb_lightning._messages import explain
from sb_lightning.callbacks import LastCheckpoint, ModelLine, PredictionWriter, RunSummary, TrainingProgress
from sb_lightning.callbacks.run_files import run_directory
from sb_lightning.cli import TRAINER_COMMANDS
from sb_lightning.cli.errors import report
from sb_lightning.cli.latency import LatencySettings, table_of_run
from sb_lightning.cli.launch import follow_rank_zero, set_threads
from sb_lightning.cli.loggers import check_loggers, csv_logger
from sb_lightning.cli.noise import hide_noise
from sb_lightning.cli.parser import TrainingParser

__all__ = ["SaveConfig", "TrainingCLI", "run"]

# What Lightning accepts for ckpt_path besides a file.
CHECKPOINT_WORDS = ("best", "last", "hpc", "registry")
PARSER_OPTIONS = {
    "prog": "sb",
    "allow_abbrev": False,
    **{
        command: {
            "allow_abbrev": False,
            "usage": f"sb {command} [--config FILE ...] [--key value | --key=value ...]",
            "description": f"{what[0].upper()}{what[1:]}.",
        }
        for command, what in TRAINER_COMMANDS.items()
    },
}


class SaveConfig(SaveConfigCallback):
    """Writes `config.yaml` into the folder of the run, beside the checkpoints, for any logger."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "overwrite": True, "save_to_log_dir": False})

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file; called on rank zero."""
        path = run_directory(trainer) / self.config_filename
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.tmp")
        self.parser.save(self.config, part, skip_none=False, overwrite=True, multifile=False)
        part.replace(path)


class TrainingCLI(LightningCLI):
    """LightningCLI with plain `model.*` and `data.*` keys, no abbreviated flags, and our callbacks.

    Args:
        model_class: The LightningModule.
        datamodule_class: The LightningDataModule.
        args: Command line; that of this process if None.
    """

    command: str | None = None
    """What the user has called, where it is another command that understands the keys of `fit`."""
    _flags: Sequence[str] = ()

    def __init__(
        self,
        model_class: type[LightningModule] | Callable[..., LightningModule],
        datamodule_class: type[LightningDataModule] | Callable[..., LightningDataModule],
        args: ArgsType = None,
    ) -> None:
        super().__init__(
            model_class,
            datamodule_class,
            save_config_callback=SaveConfig,
            trainer_defaults={
                "use_distributed_sampler": False,
                "default_root_dir": "runs",
                # ModelLine says what matters of it.
                "enable_model_summary": False,
            },
            seed_everything_default=0,
            parser_kwargs=self.parser_options(),
            parser_class=TrainingParser,
            # The module makes its optimizer itself: two ways to set a learning rate would be one too many.
            auto_configure_optimizers=False,
            args=args,
        )

    def parser_options(self) -> dict[str, Any]:
        """Return the options of the parser and of each command's."""
        return copy.deepcopy(PARSER_OPTIONS)

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """Build the parsers, under the name of the command that the user has called."""
        super().setup_parser(*args, **kwargs)
        if self.command is not None:
            self._subcommand_parsers["fit"].prog = self.command

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the keys that belong to no class."""
        parser.add_class_arguments(LatencySettings, "latency")
        parser.add_argument(
            "--threads_per_rank",
            type=int | None,
            default=None,
            help="CPU threads of each rank; null leaves it to OMP_NUM_THREADS or, without that, to "
            "Lightning, which divides the cores among the ranks",
        )

    @property
    def uses_latency(self) -> bool:
        """Whether this command reads the `latency` keys."""
        return self.subcommand == "fit"

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, without Lightning's warning about arguments given by a caller."""
        if args is None or isinstance(args, list):
            self._flags = [
                str(argument).split("=")[0] for argument in (sys.argv[1:] if args is None else args)
            ]
            self.config = parser.parse_args(args)
        else:
            self.config = parser.parse_object(args)

    def _parse_ckpt_path(self) -> None:
        # Lightning lets the checkpoint's hyperparameters win over the user's, silently: a flag that compares
        # budgets on one checkpoint would do nothing. Here they are used where nothing is said of the model.
        command = self.config.get("subcommand")
        if command in (None, "fit"):
            return
        untouched = self._subcommand_parsers[command].get_defaults().get("model")
        if self.config[command].get("model") == untouched:
            super()._parse_ckpt_path()

    def before_instantiate_classes(self) -> None:
        """Set the threads and fill in what the user left open."""
        assert self.subcommand is not None
        config = self.config[self.subcommand]
        trainer = config["trainer"]
        set_threads(config["threads_per_rank"])
        _check_checkpoint(config.get("ckpt_path"))
        ignored = [flag for flag in self._flags if flag == "--latency" or flag.startswith("--latency.")]
        # In a file they belong to the `fit` that shares it.
        if ignored and not self.uses_latency:
            rank_zero_warn(f"{', '.join(ignored)}: ignored; only fit and plan use a latency table.")
        if trainer["val_check_interval"] == 0:
            raise ValueError(
                explain(
                    "trainer.val_check_interval is 0",
                    "it counts the micro-batches between two validations",
                    "set it to 1 or more, or trainer.limit_val_batches to 0 for no validation",
                )
            )
        if trainer["limit_train_batches"] in (0, 0.0) and self.subcommand == "fit":
            rank_zero_warn("trainer.limit_train_batches is 0: nothing will be trained.")
        if trainer["logger"] in (None, True) and not trainer["barebones"]:
            # Not Lightning's choice, which depends on what is installed.
            trainer["logger"] = csv_logger(trainer["default_root_dir"])
        check_loggers(trainer["logger"])
        if self.subcommand == "predict" and config.get("return_predictions") is None:
            # PredictionWriter has kept what is needed of them.
            config["return_predictions"] = False
        has_end = (
            trainer["max_epochs"] is not None or trainer["max_steps"] != -1 or trainer["max_time"] is not None
        )
        if self.subcommand == "fit" and not has_end and not trainer["fast_dev_run"]:
            trainer["max_epochs"] = 1
            rank_zero_info(
                "Training for one epoch: none of trainer.max_epochs, .max_steps and .max_time is set."
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer with our callbacks, unless the user has configured their like."""
        assert self.subcommand is not None
        config = self.config_init[self.subcommand]["trainer"]
        callbacks: list[Callback] = list(config["callbacks"] or [])

        def add(kind: type[Callback], make: Callable[[], Callback]) -> None:
            if not any(isinstance(callback, kind) for callback in callbacks):
                callbacks.append(make())

        if config["enable_progress_bar"] is not False and not config["barebones"]:
            add(ProgressBar, TrainingProgress)
        if not config["barebones"]:
            # It has nothing to say about a run without training, but a checkpoint of one holds its state.
            add(RunSummary, RunSummary)
        if self.subcommand == "fit" and not config["barebones"]:
            add(ModelLine, ModelLine)
            if config["enable_checkpointing"] is not False:
                add(LastCheckpoint, LastCheckpoint)
        if self.subcommand == "predict" and not config["barebones"]:
            add(PredictionWriter, PredictionWriter)
        try:
            return super().instantiate_trainer(callbacks=callbacks, plugins=_plugins(config), **kwargs)
        except (ValueError, TypeError, RuntimeError, ImportError) as error:
            raise ValueError(
                explain(
                    "the Trainer cannot be made of these settings",
                    f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip("."),
                    "change the trainer.* key that this is about",
                )
            ) from error

    def before_fit(self) -> None:
        """Find the latency table, or measure it, before any other rank is started."""
        assert self.subcommand is not None
        # The data module hands rank zero's table to the others. Where something else has started them, also
        # on other machines, they wait for it to join them; none measures beside it or writes to its file.
        if self.trainer.global_rank != 0:
            return
        config = self.config_init[self.subcommand]
        table = table_of_run(
            config["latency"], self.trainer, self.model, self.datamodule, threads=config["threads_per_rank"]
        )
        if table is None:
            return
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunSummary):
                callback.latency = table
        from sb_lightning.data import TextDataModule

        if isinstance(self.datamodule, TextDataModule):
            self.datamodule.latency = table

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            seed = self._get(self.config, "seed_everything")
            raise ValueError(
                explain(f"seed_everything is {seed}", str(error), "pass a number from 0 to 4294967295")
            ) from error


def _plugins(config: Any) -> list[Any] | None:
    """Add our way of writing checkpoints where one rank writes whole files and no other way is named."""
    from sb_lightning.training.checkpoint_io import AtomicCheckpointIO

    given = config["plugins"] or []
    plugins = list(given) if isinstance(given, (list, tuple)) else [given]
    strategy = config["strategy"]
    writes_whole_files = isinstance(strategy, str) and strategy.startswith(("auto", "ddp", "single"))
    if writes_whole_files and not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpointIO())
    return plugins or None


def _check_checkpoint(path: Any) -> None:
    is_local = path is not None and "://" not in str(path) and str(path).split(":")[0] not in CHECKPOINT_WORDS
    if is_local and not Path(path).exists():
        raise ValueError(
            explain(
                f"ckpt_path is '{path}'",
                "there is no such file",
                "pass the path of a checkpoint, such as last.ckpt in the checkpoints folder of a run",
            )
        )


def run(
    arguments: Sequence[str],
    model_class: type[LightningModule] | None = None,
    datamodule_class: type[LightningDataModule] | None = None,
) -> int:
    """Run a command of the Trainer and return the exit code.

    Args:
        arguments: The command and its options.
        model_class: The LightningModule; `CausalLMModule` if None.
        datamodule_class: The LightningDataModule; `TextDataModule` if None.
    """
    follow_rank_zero()
    hide_noise()
    try:
        if model_class is None or datamodule_class is None:
            from sb_lightning.data import TextDataModule
            from sb_lightning.training import CausalLMModule

            model_class, datamodule_class = model_class or CausalLMModule, datamodule_class or TextDataModule
        TrainingCLI(model_class, datamodule_class, args=list(arguments))
    except SIGTERMException:
        print(
            "sb: ended by SIGTERM. To go on, pass --ckpt_path with the last checkpoint of the run, if it has "
            "written one.",
            file=sys.stderr,
        )
        return 143
    except SystemExit as stop:
        # --help, --print_config, a wrong option, and Lightning's end after Ctrl-C.
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    except KeyboardInterrupt as interrupt:
        told = str(interrupt) or "interrupted before the training began; nothing was saved."
        print(f"sb: {told}", file=sys.stderr)
        return 130
    except Exception as error:
        return report(error)
    return 0
