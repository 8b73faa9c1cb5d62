"""Associative recall: a task that is trained on and evaluated, as a user's own would be.

Importing this package registers it: ``coca eval recall``, ``recall:`` in studies, its section in
reports, and ``data.tasks: {recall: 0.3}`` in recipes. `studies.recall.tables` writes the tables of
results/recall.
"""

from coca_lab.data.tasks import register_blocks
from coca_lab.evaluation import register_task
from coca_lab.report import CELLS, REPORTS, TaskReport
from studies.recall.task import RECALL_TASK, RecallCell, recall_sections
from studies.recall.texts import recall_blocks

register_task(RECALL_TASK)
CELLS["recall"] = RecallCell
REPORTS["recall"] = TaskReport(recall_sections, "Associative recall")
register_blocks("recall", recall_blocks)
