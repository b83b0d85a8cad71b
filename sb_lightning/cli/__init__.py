"""The `sb` command; only the command that runs is imported, so that `sb --help` needs no torch."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from sb_lightning import __version__

__all__ = ["COMMANDS", "main"]

TRAINER_COMMANDS = {
    "fit": "train a model",
    "validate": "run the validation set through a model",
    "test": "run the test set through a model",
    "predict": "write the loss of each held-out sequence to predictions.jsonl",
}
COMMANDS = {
    **TRAINER_COMMANDS,
    "doctor": "what works on this machine, and why the rest does not",
    "profile": "measure a configuration's training steps on this machine",
    "plan": "what each balancing policy would gain, predicted without training",
    "compare": "batching and tuning, apart and together, measured side by side",
    "trace": "what each rank did when, as a Perfetto trace and as a picture",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `sb`.

    Args:
        argv: Arguments without the program's name; those of this process if None.

    Returns:
        The exit code: 0 all right, 1 the command failed (or was interrupted during training), 2 wrong usage,
        130 interrupted before training began, 143 ended by SIGTERM.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command in ("-V", "--version"):
        print(f"sb_lightning {__version__}")
        return 0
    if command in TRAINER_COMMANDS:
        return _run_trainer(arguments)
    if command == "trace":
        from sb_lightning.cli.trace import run as run_trace

        return run_trace(rest)
    if command == "doctor":
        from sb_lightning.cli.doctor import run as run_doctor

        return run_doctor(rest)
    if command == "profile":
        return _run_profile(rest)
    if command == "plan":
        from sb_lightning.cli.plan import run as run_plan

        return run_plan(rest)
    if command == "compare":
        return _run_compare(rest)
    print(_unknown(command), file=sys.stderr)
    return 2


def _run_trainer(arguments: list[str]) -> int:
    from sb_lightning.cli.launch import follow_rank_zero

    # Before the seconds that torch takes to import, in which Ctrl-C would end a launched rank.
    follow_rank_zero()
    try:
        from sb_lightning.cli.train import run
    except KeyboardInterrupt:
        print("sb: interrupted before the training began; nothing was saved.", file=sys.stderr)
        return 130
    return run(arguments)


def _run_profile(arguments: list[str]) -> int:
    try:
        from sb_lightning.cli.profile import run
    except KeyboardInterrupt:
        print("sb: interrupted before anything was measured.", file=sys.stderr)
        return 130
    return run(arguments)


def _run_compare(arguments: list[str]) -> int:
    from sb_lightning.cli.launch import follow_rank_zero

    follow_rank_zero()
    try:
        from sb_lightning.cli.compare import run
    except KeyboardInterrupt:
        print("sb: interrupted before anything was measured.", file=sys.stderr)
        return 130
    return run(arguments)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return (
        "usage: sb COMMAND [options]\n\n"
        "Load-balanced long-context training for PyTorch Lightning.\n\n"
        f"commands:\n{commands}\n\n"
        "  sb COMMAND --help                      options of a command\n"
        "  sb fit --config FILE                   train as the file says\n"
        "  sb fit --config FILE --trainer.max_steps=10 --print_config\n"
        "                                         what would run, without running it\n"
        "  sb --version"
    )


def _unknown(command: str) -> str:
    if command.startswith("-"):
        hint = f"sb: the command comes before the options, but the first argument is '{command}'."
    else:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"sb: there is no command '{command}'." + (f" Did you mean '{close[0]}'?" if close else "")
    return f"{hint}\nCommands: {', '.join(COMMANDS)}. See: sb --help"
