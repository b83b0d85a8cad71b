"""Several ways to train the same windows, measured side by side in one launch: what `sb compare` runs.

`arms`, `schedule`, `results` and `picture` are functions of plain data; `engine` runs them with Lightning.
"""

from sb_lightning.compare.arms import STUDIES, Arm, Study, select_arms
from sb_lightning.compare.results import ArmWindow, Round, summarize

__all__ = ["STUDIES", "Arm", "ArmWindow", "Round", "Study", "select_arms", "summarize"]
