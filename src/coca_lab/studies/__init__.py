"""Studies: models, trained or ready, that are evaluated alike, and their page."""

from coca_lab.studies.running import run_study
from coca_lab.studies.study import REPORT_FILE, Study, load_study

__all__ = ["REPORT_FILE", "Study", "load_study", "run_study"]
