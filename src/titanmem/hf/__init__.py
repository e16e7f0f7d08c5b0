"""titanmem in transformers: models for Auto classes, generate, Trainer and PEFT, and memories for other models' layers.

Importing this package makes the architecture known: AutoModelForCausalLM.from_pretrained then opens exported folders.
"""

from __future__ import annotations

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError("titanmem.hf needs transformers: pip install 'titanmem[hf]'", name=error.name) from error

from titanmem.hf.adapter import MemoryBranch, add_memory, freeze_base, load_memory, memory_parameters, save_memory
from titanmem.hf.cache import TitansCache
from titanmem.hf.config import TitansHFConfig
from titanmem.hf.modeling import TitansForCausalLM, TitansModel
from titanmem.hf.tokenizer import fast_tokenizer

AutoConfig.register(TitansHFConfig.model_type, TitansHFConfig, exist_ok=True)
AutoModel.register(TitansHFConfig, TitansModel, exist_ok=True)
AutoModelForCausalLM.register(TitansHFConfig, TitansForCausalLM, exist_ok=True)

__all__ = [
    "MemoryBranch",
    "TitansCache",
    "TitansForCausalLM",
    "TitansHFConfig",
    "TitansModel",
    "add_memory",
    "fast_tokenizer",
    "freeze_base",
    "load_memory",
    "memory_parameters",
    "save_memory",
]
