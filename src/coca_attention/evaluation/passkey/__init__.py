"""Passkey retrieval (CoCA paper, App. B.1). README.md beside this file says what is measured."""

from coca_attention.evaluation.passkey.task import (
    PasskeySettings,
    check_settings,
    evaluate_passkey,
    is_hit,
    passkey_prompts,
)

__all__ = [
    "PasskeySettings",
    "check_settings",
    "evaluate_passkey",
    "is_hit",
    "passkey_prompts",
]
