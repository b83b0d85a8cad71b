"""The arms of the studies, and choosing some of them."""

from __future__ import annotations

import pytest

from sb_lightning.compare.arms import STUDIES, select_arms


@pytest.mark.parametrize("study", STUDIES)
def test_arms_have_names_of_their_own_and_depend_on_arms_that_are_there(study):
    arms = select_arms(study)
    names = [arm.name for arm in arms]
    assert len(set(names)) == len(names) == len({arm.label for arm in arms})
    assert all(arm.against in names for arm in arms)
    assert all(arm.same_coverage_as in (None, *names) for arm in arms)
    by_name = {arm.name: arm for arm in arms}
    # Windows of one sequence per micro-batch do not compare with those of two.
    assert all(by_name[arm.against].sequences == arm.sequences for arm in arms)


def test_the_ablation_has_the_papers_rows_ours_and_the_control():
    arms = {arm.label: (arm.policy, arm.anchor, arm.same_coverage_as) for arm in select_arms("table2")}
    assert arms == {
        "Baseline": ("random", None, None),
        "+DST": ("random", "mean", None),
        "+SAB": ("latency", None, None),
        "+LBB": ("length", None, None),
        "+SAB+DST": ("latency", "mean", None),
        "+LBB+DST": ("length", "mean", None),
        "+SAB+DST(slack)": ("latency", "slack", None),
        "+SAB, uniform k": ("latency", None, "sab_dst"),
        "+SAB, uniform k (slack)": ("latency", None, "sab_dst_slack"),
    }


def test_some_arms_come_in_the_order_of_the_study():
    assert [arm.name for arm in select_arms("table2", ["lbb", "baseline"])] == ["baseline", "lbb"]


@pytest.mark.parametrize(
    ("study", "names", "message"),
    [
        ("table3", None, "--study is 'table3'.*To fix it, pass one of table2"),
        ("table2", ["sab_dts"], r"did you mean sab_dst\?.*To fix it, pass some of baseline"),
        ("table2", [], "--arms is empty"),
        ("table2", ["baseline", "sab_uniform"], "add sab_dst to --arms"),
    ],
)
def test_what_is_not_there_is_named(study, names, message):
    with pytest.raises(ValueError, match=message):
        select_arms(study, names)
