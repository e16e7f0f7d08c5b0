"""`titanmem generate MODEL PROMPT`: continue a prompt with a model folder that `titanmem export` wrote.

Without a tokenizer in the folder, a model of 256 ids reads and writes bytes.
"""

from __future__ import annotations

import argparse
import sys

from titanmem.cli.model import add_model, add_sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("prompt", help="text to continue; - reads standard input")
    parser.add_argument("--tokens", type=int, default=200, help="how many to generate (default: 200)")
    add_sampling(parser)
    parser.add_argument("--stop", action="append", default=[], help="stop at this text; may be given several times")
    parser.add_argument("--state", help="a ModelState file to go on from")
    parser.add_argument("--save-state", help="write the state after the last token here")
    parser.add_argument("--device", default=None, help="cpu, cuda, … (default: cuda if there is one)")


def run(arguments: argparse.Namespace) -> int:
    import torch

    from titanmem.data.tokenizer import TextStream, find_tokenizer
    from titanmem.models.base import find_device
    from titanmem.models.generation import stream
    from titanmem.models.language import TitansLM
    from titanmem.models.shipped import model_folder
    from titanmem.state import ModelState

    device = find_device(arguments.device)
    folder = model_folder(arguments.model)
    model = TitansLM.load(folder, device).eval()
    tokenizer = find_tokenizer(folder, model.config.vocab_size)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise ValueError("the prompt has no tokens; give at least one character")
    state = ModelState.load(arguments.state, device) if arguments.state else None
    ids = torch.tensor([tokens], device=device)
    text = TextStream(tokenizer)
    step = None
    for step in stream(
        model, ids, arguments.tokens, state=state, decode=tokenizer.decode,
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty, stop=arguments.stop, seed=arguments.seed,
    ):  # fmt: skip
        print(text.push(int(step.ids)), end="", flush=True)
    print(text.finish())
    if arguments.save_state:
        if step is None:
            raise ValueError("--save-state needs at least one generated token; raise --tokens")
        with torch.no_grad():
            _, after = model(step.ids.unsqueeze(1), step.state)
        after.save(arguments.save_state)
        print(f"state saved to {arguments.save_state}; go on with --state {arguments.save_state}", file=sys.stderr)
    return 0
