"""Associative recall: a task that is trained on and evaluated, as a user's own would be.

Importing this package registers it: ``coca eval recall``, ``recall:`` in studies, and ``data.tasks:
{recall: 0.3}`` in recipes. `studies.recall.tables` writes the tables of results/recall.
"""

from coca_lab.data.tasks import register_blocks
from coca_lab.evaluation import register_task
from studies.recall.task import RECALL_TASK
from studies.recall.texts import recall_blocks

register_task(RECALL_TASK)
register_blocks("recall", recall_blocks)
