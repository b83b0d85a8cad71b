"""Figures from planted times, against those worked out by hand."""

from __future__ import annotations

import json

import pytest
from compare_cases import rounds_of, window

from sb_lightning.compare.arms import Arm
from sb_lightning.compare.report import write_report
from sb_lightning.compare.results import Round, show, summarize
from sb_lightning.compare.round_file import decode_round
from sb_lightning.compare.uniform import CoverageCurve

BASE = Arm(name="baseline", label="Baseline", policy="random", paper_speedup=1.0)
SAB = Arm(name="sab", label="+SAB", policy="latency", paper_speedup=1.21)


@pytest.fixture
def rounds():
    # The first two windows of each arm are of the round that is not counted.
    base = [window(0, wall_ms=9e9), window(1, wall_ms=9e9), window(2), window(3, wall_ms=140.0)]
    even = ((20.0, 40.0), (30.0, 30.0))
    sab = [
        window(0),
        window(1),
        window(2, busy=even, predicted=((20.0, 34.0), (20.0, 30.0)), wall_ms=64.0, tune_ms=2.0,
               work_ratio=0.9, coverage_change=-0.5, decisions=8.0, infeasible=2.0, loss=3.0),
        window(3, busy=even, wall_ms=96.0, tune_ms=4.0, work_ratio=0.8, rows=30.0, coverage_change=-1.5,
               decisions=8.0, infeasible=0.0, loss=4.0),
    ]  # fmt: skip
    return rounds_of({"baseline": base, "sab": sab})


def test_figures_are_those_worked_out_by_hand(rounds):
    found = summarize([BASE, SAB], rounds)
    assert list(found) == ["baseline", "sab"]
    base, sab = found["baseline"], found["sab"]
    # Ranks are busy 30 and 90 ms: max/mean 90/60. Slots 30/20 and 60/40; cells 60/30; ranks 20/15 and 60/45.
    assert base["imbalance"]["median"] == pytest.approx(1.5)
    assert base["imbalance_slot"]["median"] == pytest.approx(1.5)
    assert base["imbalance_micro_batch"]["median"] == pytest.approx(2.0)
    assert base["imbalance_within"]["median"] == pytest.approx(4 / 3)
    # The slowest rank works 30 ms longer than the mean: walls of 100 and 140 would be 70 and 110.
    assert base["perfect_ms"]["median"] == pytest.approx(90.0)
    assert base["share_of_perfect"] == pytest.approx(180 / 240)
    assert base["speedup"] == 1.0
    assert base["speedup_of_perfect_balance"] == pytest.approx(240 / 180)
    assert base["iteration_ms"] == {"median": 120.0, "q1": 110.0, "q3": 130.0}
    assert base["final_loss"] == 2.0
    assert sab["windows"] == 2
    assert sab["speedup"] == pytest.approx(240 / 160)
    assert sab["speedup_spread"]["median"] == pytest.approx((100 / 64 + 140 / 96) / 2)
    # Predicted makespans: 90 + 90 against 54 + 60.
    assert sab["speedup_predicted"] == pytest.approx(180 / 114)
    assert sab["prediction_error"] == pytest.approx((6 / 60 + 0) / 2)
    assert sab["speedup_busy"] == pytest.approx(180 / 120)
    assert sab["imbalance"]["median"] == 1.0
    assert sab["share_of_perfect"] == 1.0
    assert sab["tune_ms"]["median"] == 3.0
    assert sab["work_ratio"] == pytest.approx(0.85)
    # By rows, not by windows.
    assert sab["coverage_change"] == pytest.approx(-2.0 / 40)
    assert sab["infeasible"] == pytest.approx(2 / 16)
    assert sab["final_loss"] == 3.5


def test_the_page_shows_every_arm_and_the_bound(rounds):
    lines = show(summarize([BASE, SAB], rounds)).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "Baseline",
        "+SAB",
        "perfect balance of Baseline",
    ]
    assert "120 (110-130)" in lines[2]
    assert "| 1.500 | 1.579 |" in lines[3]
    assert "-0.0500" in lines[3]
    assert "| 1.333 |" in lines[4]


def test_no_arm_is_dropped_silently(rounds):
    del rounds[1].windows["sab"]
    with pytest.raises(ValueError, match="round 1 has no windows of sab"):
        summarize([BASE, SAB], rounds)
    with pytest.raises(ValueError, match="round 0 has no windows of lbb"):
        summarize([BASE, Arm(name="lbb", label="+LBB", policy="length")], rounds)


def test_other_windows_are_not_compared(rounds):
    rounds[1].windows["sab"] = tuple(window(n, members="others") for n in (2, 3))
    with pytest.raises(ValueError, match="window 2 of sab holds other sequences than that of baseline"):
        summarize([BASE, SAB], rounds)


def test_without_what_it_is_compared_to_an_arm_has_its_own_figures(rounds):
    alone = summarize([SAB], rounds)["sab"]
    assert alone["speedup"] is None
    assert alone["iteration_ms"]["median"] == 80.0


def test_windows_in_which_a_rank_ran_less_and_without_predictions_or_loss():
    ragged = ((10.0, None), (10.0, 20.0))
    windows = [window(n, busy=ragged, predicted=((None, None), (None, None)), loss=None) for n in range(4)]
    found = summarize([BASE], rounds_of({"baseline": windows}))["baseline"]
    assert found["imbalance"]["median"] == pytest.approx(1.5)
    assert found["prediction_error"] is None
    assert found["speedup_predicted"] is None
    assert found["final_loss"] is None
    assert "| - |" in show({"baseline": found})


def test_a_round_survives_json(rounds):
    curve = CoverageCurve(rows=2.0, sums=(0.0, 1.0), budget=3, usual=4)
    given = Round(**{**vars(rounds[0]), "curves": {"sab": curve}})
    assert decode_round(json.loads(json.dumps(given.to_dict()))) == given


@pytest.mark.parametrize("study", ["table2", "fig8", "fig9", "fig10"])
def test_every_study_leaves_its_three_files(study, tmp_path):
    from sb_lightning.compare.arms import select_arms

    arms = select_arms(study)
    planted = rounds_of({arm.name: [window(n) for n in range(6)] for arm in arms})
    about = {"machine": "a machine", "command": "sb compare"}
    written = write_report(tmp_path, study, arms, planted, about)
    assert [path.name for path in written] == ["results.json", "results.md", "results.png"]
    assert written[2].read_bytes()[:4] == b"\x89PNG"
    document = json.loads(written[0].read_text())
    assert list(document["arms"]) == [arm.name for arm in arms]
    assert document["machine"] == "a machine"
    assert all(row["windows"] == 4 for row in document["arms"].values())
    assert document["targets"] == []
    page = written[1].read_text()
    assert "Goals of" not in page
    assert all(f"| {arm.label} | 4 |" in page for arm in arms)
    assert "a machine" in page


def test_goals_are_those_of_a_preset_and_the_tables_error_is_told(rounds, tmp_path):
    about = {"machine": "a machine"}
    told = {"table_error": 0.25, "with_goals": True, "with_picture": False}
    write_report(tmp_path, "table2", [BASE, SAB], rounds, about, **told)
    page = (tmp_path / "results.md").read_text()
    assert "Goals of sb_lightning for configs/compare.yaml:\n\n- met: +SAB reaches" in page
    assert "- Note: the latency table is off by 25%" in page
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["table_error"] == 0.25
    assert len(document["targets"]) > 0
    assert "off by 25%" in document["notes"][0]


def test_a_folder_in_which_nothing_can_be_written_is_named(rounds, tmp_path):
    (tmp_path / "results.md").mkdir()
    with pytest.raises(OSError, match=r"nothing can be written .*To fix it, .*\(--output\)"):
        write_report(tmp_path, "table2", [BASE, SAB], rounds, {"machine": "one"}, with_picture=False)
