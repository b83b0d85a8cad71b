"""Every configuration under configs/ parses, prints itself, and runs a step on the ranks it asks for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from sb_lightning.cli import main

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
# A few files of the standard library: the real text, in the time a test has.
SMALL_SOURCE = str(Path(json.__file__).parent)


def ids(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_it_prints_itself_and_what_it_prints_is_the_same_configuration(config, capsys, tmp_path):
    printed = []
    for source in (config, tmp_path / "printed.yaml"):
        assert main(["fit", "--config", str(source), "--print_config"]) == 0
        printed.append(capsys.readouterr().out)
        (tmp_path / "printed.yaml").write_text(printed[-1], encoding="utf-8")
    assert printed[0] == printed[1]
    given, shown = yaml.safe_load(config.read_text(encoding="utf-8")), yaml.safe_load(printed[0])
    assert contains(shown, given)


def contains(whole, part):
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_every_key_has_a_comment_above_it(config):
    lines = config.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        key = line.strip()
        has_value = ":" in key and not key.startswith("#") and not key.endswith(":")
        if has_value and not any(
            above.strip().startswith("#") for above in lines[max(0, number - 8) : number]
        ):
            pytest.fail(f"{config.name}:{number + 1}: no comment above '{key}'")


def fast_dev_run(config, folder):
    os.chdir(folder)
    overrides = {
        "trainer.fast_dev_run": "true",
        "trainer.default_root_dir": str(folder / "runs"),
        "data.source": SMALL_SOURCE,
        "data.file_pattern": "*.py",
        "data.validation_share": "0.4",
        "data.cache_dir": str(folder / "cache"),
    }
    return main(["fit", "--config", str(config), *(f"--{key}={value}" for key, value in overrides.items())])


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_it_runs_a_step(config, tmp_path, gloo_pool):
    devices = yaml.safe_load(config.read_text(encoding="utf-8"))["trainer"]["devices"]
    assert devices == 2, "run other numbers of ranks outside the pool"
    assert gloo_pool.run(fast_dev_run, config, tmp_path) == [0, 0]
