"""Passkey retrieval (CoCA paper, App. B.1). README.md in this folder describes the task."""

from coca_lab.evaluation.passkey.task import TASK, PasskeySettings, evaluate_passkey

__all__ = ["TASK", "PasskeySettings", "evaluate_passkey"]
