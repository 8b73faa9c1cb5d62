"""The paper's comparison at a size of one's choice, in pieces of time: train, evaluate, report.

Everything follows from a size and a number of tokens. What depends on the machine is decided once
and kept in ``plan.json``, so that the same command goes on where the last one was cut.
"""

from coca_lab.studies.reproduce.plan import Plan, make_plan, suite_of
from coca_lab.studies.reproduce.run import Deadline, reproduce
from coca_lab.studies.reproduce.settings import ReproduceSettings

__all__ = ["Deadline", "Plan", "ReproduceSettings", "make_plan", "reproduce", "suite_of"]
