"""PEFT's default target modules for CoCA models: adapters without ``target_modules``."""

from typing import Any

from coca_attention.models.families import FAMILIES

TABLES = "TRANSFORMERS_MODELS_TO_", "_TARGET_MODULES_MAPPING"


def add_default_targets(constants: Any) -> None:
    """Add the CoCA families to PEFT's tables of default target modules.

    Methods that adapt queries and values of Llama by default adapt T as well, since it is what a
    conversion changes. IA3 rescales T, values and the inputs of the last feed-forward projection,
    where it rescales keys, values and these inputs in Llama.

    Args:
        constants: The module `peft.utils.constants`.
    """
    types = {family.config.model_type: family for family in FAMILIES}
    tables = {
        name: table
        for name, table in vars(constants).items()
        if name.startswith(TABLES[0]) and name.endswith(TABLES[1])
    }
    for table in tables.values():
        if table.get("llama") == ["q_proj", "v_proj"]:
            for kind in types:
                table[kind] = ["q_proj", "t_proj", "v_proj"]
    for kind, family in types.items():
        down = family.down_name
        tables[f"{TABLES[0]}IA3{TABLES[1]}"][kind] = ["t_proj", "v_proj", down]
        constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING[kind] = [down]
