"""What users can set: documented dataclasses, whose fields are options and fields of YAML files.

Nothing here imports torch, Transformers, SciPy or pandas, so that the help of a command comes at
once. What needs a model or a text to be checked is checked where it is used.
"""
