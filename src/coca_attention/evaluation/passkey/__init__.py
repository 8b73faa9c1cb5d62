"""Passkey retrieval (CoCA paper, App. B.1). README.md in this folder describes the task."""

from coca_attention.evaluation.passkey.task import (
    TASK,
    PasskeySettings,
    check_settings,
    evaluate_passkey,
    is_hit,
    passkey_prompts,
)

__all__ = [
    "TASK",
    "PasskeySettings",
    "check_settings",
    "evaluate_passkey",
    "is_hit",
    "passkey_prompts",
]
