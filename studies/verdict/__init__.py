"""Score functions of other papers, and ablations of our own, in one small Llama.

Importing this package registers the model with Transformers' Auto classes as ``baseline_llama``. A
score is a file: its paper's equation, and a class in `SCORES`.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from studies.verdict.model import SCORES, BaselineConfig, BaselineForCausalLM

AutoConfig.register(BaselineConfig.model_type, BaselineConfig)
AutoModelForCausalLM.register(BaselineConfig, BaselineForCausalLM)

__all__ = ["SCORES", "BaselineConfig", "BaselineForCausalLM"]
