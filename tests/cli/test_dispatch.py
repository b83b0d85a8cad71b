from __future__ import annotations

import subprocess
import sys

import pytest

from sb_lightning import __version__
from sb_lightning.cli import COMMANDS, main

HEAVY = ("torch", "lightning", "transformers", "numpy", "rich", "jsonargparse")


def imported_by(code):
    program = f"import sys\n{code}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["fti"], []], ids=str)
def test_nothing_heavy_is_imported_before_a_command_runs(argv):
    names = imported_by(f"from sb_lightning.cli import main\nmain({argv!r})")
    assert names.isdisjoint(HEAVY), names & set(HEAVY)


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == main(["-V"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"sb_lightning {__version__}"] * 2


def test_no_command_is_wrong_usage(capsys):
    assert main([]) == 2
    assert "usage: sb" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("fti", "Did you mean 'fit'?"),
        ("validation", "Did you mean 'validate'?"),
        ("xyzzy", "no command 'xyzzy'.\n"),
    ],
)
def test_an_unknown_command_gets_a_suggestion(word, hint, capsys):
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert f"Commands: {', '.join(COMMANDS)}. See" in error


def test_options_before_the_command(capsys):
    assert main(["--config", "a.yaml", "fit"]) == 2
    assert "the command comes before the options" in capsys.readouterr().err


def test_python_m_is_sb():
    result = subprocess.run(
        [sys.executable, "-m", "sb_lightning", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == f"sb_lightning {__version__}"
