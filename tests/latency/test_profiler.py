"""The profile of a machine that is a formula: what is recovered, in which time, and after interruptions."""

from __future__ import annotations

import io
import os
import re
import threading
from dataclasses import asdict, replace

import pytest
import torch
from fake_machine import CONFIG, LAYERS, ONCE, Machine, conditions, profiled, read, step_ms
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from sb_lightning.latency import LatencyTable, profile
from sb_lightning.latency.profiler import run_profile
from sb_lightning.latency.profiler.points import Grid, Point
from sb_lightning.latency.profiler.report import DRAW_EVERY_S, doubts
from sb_lightning.latency.profiler.samples import Record, Sample
from sb_lightning.latency.profiler.schedule import MOST_STEPS, VISIT_MS


def test_the_parts_and_what_a_micro_batch_pays_once_are_recovered():
    table = profiled(Machine(), budget_seconds=600)
    assert table.fixed_ms == pytest.approx(
        3 * (sum(ONCE.values()) + ONCE["attention"] + ONCE["rest"]), rel=1e-6
    )
    for point in table.profile["points"]:
        whole = table.micro_batch_ms([point["length"]], point["budget"])
        if not point["held_out"]:
            assert whole == pytest.approx(step_ms(point["length"], point["budget"]), rel=1e-3), point
    # Two packed sequences pay it once.
    alone = step_ms(1024, 4) + step_ms(4096, 8)
    assert table.micro_batch_ms([1024, 4096], [4, 8]) == pytest.approx(alone - table.fixed_ms, rel=0.01)
    forward, backward = table.attention_passes(4096, 8)
    assert backward == pytest.approx(2 * forward, rel=1e-6)


@pytest.mark.parametrize("noise", [0.0, 0.04])
def test_held_out_points_are_predicted_better_than_by_length_or_flops(noise):
    table = profiled(Machine(noise), budget_seconds=60)
    points, errors = table.profile["points"], table.profile["errors"]
    held_out = [point for point in points if point["held_out"]]
    assert 0.17 <= len(held_out) / len(points) <= 0.22
    # None of them is a point of the table.
    in_table = {(point["length"], point["budget"]) for point in points if not point["held_out"]}
    assert not in_table & {(point["length"], point["budget"]) for point in held_out}
    assert errors["table"]["median"] <= 0.03
    assert errors["table"]["median"] <= errors["length"]["median"] / 3
    assert errors["table"]["median"] <= errors["flops"]["median"] / 3
    for point in held_out:
        assert point["measured_ms"] == pytest.approx(
            step_ms(point["length"], point["budget"]), rel=4 * noise + 1e-9
        )
    # The note about the noise is true.
    assert table.profile["noise"]["spread"] == pytest.approx(noise, rel=0.5, abs=1e-9)


def test_it_stops_where_more_samples_would_tell_nothing():
    quiet, noisy = Machine(), Machine(0.05)
    tables = [profiled(machine, budget_seconds=500) for machine in (quiet, noisy)]
    assert tables[0].profile["seconds"] < 200
    assert all(5 <= point["samples"] <= 10 for point in tables[0].profile["points"])
    assert tables[1].profile["seconds"] > tables[0].profile["seconds"]


@pytest.mark.parametrize("budget_seconds", [0.05, 1, 7, 30])
def test_the_seconds_are_kept_and_a_table_comes_of_any_number(budget_seconds):
    machine = Machine(0.02)
    table = profiled(machine, budget_seconds=budget_seconds)
    longest_turn = max(VISIT_MS * 2, *(step_ms(n, k) for n, k in _points(table))) / 1000
    # The three shortest lengths are measured whatever the seconds.
    assert table.profile["seconds"] <= max(budget_seconds + longest_turn, 0.8)
    assert machine.clock() - 1000 <= table.profile["seconds"] + step_ms(8192, 128) / 1000
    assert len(table.measurements.lengths) >= 3
    for n, k in _points(table):
        assert table.micro_batch_ms([n], k) == pytest.approx(step_ms(n, k), rel=0.15)


def _points(table):
    return [(point["length"], point["budget"]) for point in table.profile["points"] if not point["held_out"]]


def test_more_seconds_make_a_finer_table():
    counts = [
        len(profiled(Machine(0.02), budget_seconds=seconds).profile["points"]) for seconds in (5, 15, 60)
    ]
    assert counts == sorted(set(counts)), counts


def test_what_the_time_did_not_suffice_for_is_said():
    console = Console(file=io.StringIO(), width=120)
    table = profiled(Machine(), budget_seconds=0.05, console=console)
    text = console.file.getvalue()
    longest = table.measurements.lengths[-1]
    assert longest < 8192
    assert f"sequences up to {longest} tokens; longer ones are extrapolated" in text
    (short,) = re.findall(
        r"0\.05 s do not suffice for one round: about (\d+) of (\d+) points, .* of (\d+) tokens and more, "
        r"are left out, and such times extrapolated\. (\d+) s would do",
        text,
    )
    missing, points, least, seconds = map(int, short)
    assert 0 < missing < points
    assert least <= 8192
    console = Console(file=io.StringIO(), width=120)
    table = profiled(Machine(), budget_seconds=seconds, console=console)
    assert "do not suffice" not in console.file.getvalue()
    assert table.measurements.lengths[-1] == 8192
    # The plan comes first, with its time.
    assert re.search(r"plan: sequences of 64 to 8192 tokens, .* one round takes about .* at most 0 s", text)
    for word in ("table", "length only", "FLOPs only", "Noise"):
        assert word in text


def test_a_terminal_sees_a_bar():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    profiled(Machine(), budget_seconds=3, console=console)
    text = console.file.getvalue()
    assert text.index("plan:") < text.index("measuring")
    assert re.search(r"level \d: \d+ points, \d+ settled", text)


def test_the_bar_draws_in_no_other_thread():
    machine, threads = Machine(), set()

    def measure(point):
        threads.update(threading.enumerate())
        return machine(point)

    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    before = set(threading.enumerate())
    run_profile(conditions(), budget_seconds=3, measure=measure, clock=machine.clock, console=console)
    assert threads <= before
    # And seldom, but more than once.
    draws = console.file.getvalue().count("measuring")
    assert 3 <= draws <= 3 / DRAW_EVERY_S + 3


@pytest.mark.parametrize("stop_at", [2, 30, 90])
def test_an_interrupted_profile_goes_on_as_if_nothing_had_been(stop_at, tmp_path):
    whole = profiled(Machine(0.05), budget_seconds=15, output=tmp_path / "whole.json")
    machine = Machine(0.05, stop_at=stop_at)
    output = tmp_path / "table.json"
    partial = tmp_path / "table.json.partial.json"
    with pytest.raises(KeyboardInterrupt):
        profiled(machine, budget_seconds=15, output=output)
    assert not output.exists()
    kept = {}
    if partial.exists():
        document = read(partial)
        kept = {
            Point(p["length"], p["budget"], p["is_held_out"], p["copies"]): len(p["samples"])
            for p in document["points"]
        }
    assert bool(kept) == (stop_at > 2)
    # Samples of a turn that was not finished are measured again; the first step of all was for the plan only.
    assert 0 <= sum(machine.times_at.values()) - sum(kept.values()) - 1 < MOST_STEPS
    machine.stop_at = None
    machine.times_at.clear()
    machine.times_at.update(kept)
    if kept:
        machine.times_at[first_point()] += 1
    resumed = profiled(machine, budget_seconds=15, output=output)
    assert resumed.to_dict() == whole.to_dict()
    assert LatencyTable.load(output).to_dict() == whole.to_dict()
    assert not partial.exists()


def first_point():
    """The point of the one step that the plan's estimate comes from."""
    machine = Machine(stop_at=2)
    with pytest.raises(KeyboardInterrupt):
        profiled(machine, budget_seconds=15)
    (point,) = machine.times_at
    return point


def interrupted(path, given):
    with pytest.raises(KeyboardInterrupt):
        profiled(Machine(stop_at=40), budget_seconds=15, given=given, output=path)


def test_samples_of_another_run_are_not_mixed_in(tmp_path):
    path = tmp_path / "table.json"
    interrupted(path, conditions())
    for other, names in (
        (conditions(ranks=2), "ranks (1 in the table, 2 here)"),
        (conditions(threads=3), "threads (1 in the table, 3 here)"),
        (conditions(dtype="bfloat16"), "dtype (float32 in the table, bfloat16 here)"),
        (conditions(dtype="bfloat16", mixed=True), "bfloat16-mixed here"),
        (conditions(max_length=4096), "max_length (8192 in the file, 4096 here)"),
        (
            conditions(activation_checkpointing=True),
            "activation_checkpointing (False in the file, True here)",
        ),
        (conditions(config={**CONFIG, "num_experts": 8}), "architecture ("),
        (replace(conditions(), parameters=(9, 3)), "parameters (None in the file, [9, 3] here)"),
    ):
        with pytest.raises(ValueError, match=re.escape(names)) as error:
            profiled(Machine(), budget_seconds=15, given=other, output=path)
        assert f"delete {path}.partial.json" in str(error.value)
    assert (tmp_path / "table.json.partial.json").exists()


@pytest.mark.parametrize(
    "change", ["cut", "version", "sample", "kind", "length", "seconds", "settings", "nested"]
)
def test_a_damaged_partial_file_is_refused(change, tmp_path):
    path, partial = tmp_path / "table.json", tmp_path / "table.json.partial.json"
    interrupted(path, conditions())
    text = partial.read_text()
    damaged = {
        "cut": text[:-20],
        "version": text.replace('"version": 1', '"version": 99'),
        "sample": re.sub(r'"samples": \[\[[\d.e+-]+', '"samples": [["x"', text, count=1),
        "kind": "[1, 2]",
        "length": re.sub(r'"length": \d+', '"length": 7', text, count=1),
        "seconds": re.sub(r'"spent_s": [\d.e+-]+', '"spent_s": NaN', text),
        "settings": re.sub(r'"settings": \{.*?\}', '"settings": null', text),
        "nested": "[" * 100_000,
    }[change]
    assert damaged != text
    partial.write_text(damaged)
    with pytest.raises(ValueError, match=r"cannot be read .* delete .*partial\.json"):
        profiled(Machine(), budget_seconds=15, output=path)


def test_table_and_picture_are_written(tmp_path):
    profiled(Machine(), budget_seconds=3, output=tmp_path / "deep" / "table.json")
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["table.json", "table.png"]
    assert (tmp_path / "deep" / "table.png").read_bytes().startswith(b"\x89PNG")
    table = LatencyTable.load(tmp_path / "deep" / "table.json")
    assert table.layers == LAYERS
    assert set(table.profile["errors"]) == {"table", "length", "flops"}
    assert table.profile["settings"]["max_length"] == 8192


@pytest.mark.parametrize(
    "name", ["table.png", "table.PNG", "folder", "run.yaml", "run.yaml/table.json", "pipe"]
)
def test_an_output_that_cannot_hold_table_and_picture_is_refused_before_measuring(name, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "run.yaml").write_text("trainer: {}")
    os.mkfifo(tmp_path / "pipe")
    machine = Machine()
    with pytest.raises(ValueError, match=r"the output .*To fix it, name "):
        profiled(machine, budget_seconds=3, output=tmp_path / name)
    assert machine.steps == 0
    assert (tmp_path / "run.yaml").read_text() == "trainer: {}"


def test_an_older_table_is_replaced(tmp_path):
    first = profiled(Machine(), budget_seconds=1, output=tmp_path / "table.json")
    profiled(Machine(), budget_seconds=3, output=tmp_path / "table.json")
    assert LatencyTable.load(tmp_path / "table.json").to_dict() != first.to_dict()


def test_only_models_of_transformers_are_measured():
    with pytest.raises(TypeError, match=r"the model is a Linear: .* To fix it, pass a causal language model"):
        profile(torch.nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("held_out", "noise", "medians", "said"),
    [
        (9, (0.02, 0.01), (0.02, 0.3, 0.2), None),
        (4, (0.02, 0.01), (0.02, 0.3, 0.2), "4 held-out points are too few"),
        (9, (None, None), (0.02, 0.3, 0.2), "no point was measured twice"),
        (9, (0.3, 0.01), (0.02, 0.3, 0.2), "the machine was busy"),
        (9, (0.02, 0.01), (0.25, 0.3, 0.2), "a simple predictor did better"),
        (0, (None, None), (None, None, None), "0 held-out points are too few to judge it, no point was"),
    ],
)
def test_doubts_about_a_table_are_told(held_out, noise, medians, said):
    found = doubts(
        {
            "points": [{"held_out": i < held_out} for i in range(40)],
            "noise": {"spread": noise[0], "held_out_error": noise[1]},
            "errors": {
                name: {"median": m} for name, m in zip(("table", "length", "flops"), medians, strict=True)
            },
        }
    )
    assert (found is None) if said is None else (said in found and "Measure again" in found)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_usual_rights_and_leave_nothing_beside_them(umask, tmp_path):
    before = os.umask(umask)
    try:
        profiled(Machine(), budget_seconds=1, output=tmp_path / "table.json")
        interrupted(tmp_path / "other.json", conditions())
    finally:
        os.umask(before)
    names = ["other.json.partial.json", "table.json", "table.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in names} == {0o666 & ~umask}


def test_names_of_no_cost_are_no_part_of_the_conditions():
    same = {**CONFIG, "_name_or_path": "elsewhere", "pad_token_id": 3, "max_position_embeddings": 99}
    assert conditions(config=same).settings == conditions().settings
    for other in ({"num_experts": 8}, {"tie_word_embeddings": True}, {"hidden_act": "gelu"}):
        assert conditions(config={**CONFIG, **other}).settings != conditions().settings


def test_layers_that_were_not_measured_are_counted():
    deep = conditions(config={**conditions().spec.config, "num_hidden_layers": 24, "layer_types": None})
    measured = deep.spec.with_few_layers()
    assert measured.layers == (3, 0)
    table = profiled(Machine(), budget_seconds=60, given=deep)
    assert table.layers == 24
    assert table.profile["measured_layers"] == 3


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_seconds_are_positive(seconds):
    with pytest.raises(ValueError, match="budget_seconds is"):
        profiled(Machine(), budget_seconds=seconds)


def test_steps_that_other_programs_interrupted_do_not_count():
    record = Record()
    record.add([Sample(30, 60, 20, 40, busy=0.5)])
    # Better than nothing, until there is a better one.
    assert record.whole_ms == 90
    assert (record.spread, record.error) == (None, None)
    record.add([Sample(10, 20, 8, 16, busy=0.99), Sample(40, 60, 20, 40, busy=0.7), Sample(12, 20, 8, 16)])
    assert [sample.whole for sample in record.used] == [30, 32]
    # Of two values the lower: what disturbs a step makes it longer.
    assert record.whole_ms == 30
    again = Record.from_rows(record.to_rows(), record.visits)
    assert (again.samples, again.used, again.visits) == (record.samples, record.used, 2)


def test_the_share_of_interrupted_steps_is_told():
    machine = Machine()
    console = Console(file=io.StringIO(), width=200)

    def measure(point):
        sample = machine(point)
        if machine.times_at[point] % 2:
            return sample
        return Sample(**{**asdict(sample), "forward": 5 * sample.forward, "busy": 0.4})

    table = run_profile(
        conditions(), budget_seconds=20, measure=measure, clock=machine.clock, console=console
    )
    assert table.profile["noise"]["interrupted"] == pytest.approx(0.4, abs=0.1)
    assert "Other programs interrupted" in console.file.getvalue()
    assert table.profile["noise"]["spread"] == pytest.approx(0, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    block=st.sampled_from([16, 48, 64, 128, 512]), max_length=st.integers(128, 200_000), budgets=st.booleans()
)
def test_a_grid_is_sound(block, max_length, budgets):
    grid = Grid(block_size=block, max_length=max_length, has_budget=budgets)
    coarse = set(grid.levels[0])
    for level in grid.levels:
        points = set(level)
        assert coarse <= points
        assert len(points) == len(level)
        assert grid.pair in points
        for point in points:
            assert grid.shortest <= point.length <= max_length
            assert 1 <= point.budget <= grid.blocks(point.length)
            if not point.is_held_out:
                assert Point(point.length, grid.blocks(point.length), copies=point.copies) in points
        coarse = points
    in_table = {(p.length, p.budget) for p in grid.levels[-1] if not p.is_held_out}
    held_out = {(p.length, p.budget) for p in grid.levels[-1] if p.is_held_out}
    assert not in_table & held_out
    lengths = {p.length for p in grid.levels[0] if not p.is_held_out}
    assert {grid.shortest, max_length} <= lengths
    if not budgets:
        assert all(p.budget == grid.blocks(p.length) for p in grid.levels[-1])


def test_there_must_be_room_for_a_grid():
    with pytest.raises(ValueError, match="max_length is 100"):
        Grid(block_size=64, max_length=100)
