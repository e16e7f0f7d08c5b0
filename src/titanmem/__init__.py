"""Titans: neural memory that learns while it reads (arXiv 2501.00663)."""

from titanmem.layers.neural_memory import MemoryConfig, NeuralMemory, Probe
from titanmem.models.base import load
from titanmem.models.language import TitansConfig, TitansLM
from titanmem.ops.backend import backend
from titanmem.state import MemoryState, ModelState

__version__ = "0.1.0"

__all__ = [
    "MemoryConfig",
    "MemoryState",
    "ModelState",
    "NeuralMemory",
    "Probe",
    "TitansConfig",
    "TitansLM",
    "backend",
    "load",
]
