"""Paceline: build, check, measure and serve draft models for speculative decoding (vLLM 0.31.0)."""

__all__ = ["__version__"]

__version__ = "0.1.0"
