"""Model-free proposers that vLLM loads by name through its `custom_class` method.

Imported inside the engine's process: numpy only. `classes.py` has what vLLM makes; the rest is how
a draft is found. Every draft has exactly K tokens.
"""

__all__: list[str] = []
