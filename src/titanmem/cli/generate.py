"""`titanmem generate MODEL PROMPT`: continue a prompt with a model folder that `TitansLM.save` wrote."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder with config.json and model.safetensors")
    parser.add_argument("prompt", help="text to continue; - reads standard input")
    parser.add_argument("--tokens", type=int, default=200, help="how many to generate (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=None)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--stop", action="append", default=[], help="stop at this text; may be given several times")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--state", help="a ModelState file to go on from")
    parser.add_argument("--save-state", help="write the state after the last token here")
    parser.add_argument("--device", default=None, help="cpu, cuda, … (default: cuda if there is one)")


def run(arguments: argparse.Namespace) -> int:
    import torch

    from titanmem.models.generation import stream
    from titanmem.models.language import TitansLM
    from titanmem.state import ModelState

    if (arguments.device or "cpu").startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {arguments.device}: this torch finds no GPU; use --device cpu")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = TitansLM.load(arguments.model, device).eval()
    if model.config.vocab_size != 256:
        raise ValueError(
            f"{arguments.model} has a vocabulary of {model.config.vocab_size}; without a tokenizer in the folder only "
            "byte models (vocab_size=256) can be prompted with text"
        )
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise ValueError("the prompt is empty; give at least one character")
    state = ModelState.load(arguments.state, device) if arguments.state else None
    ids = torch.tensor([list(prompt.encode())], device=device)
    writer = ByteWriter()
    step = None
    for step in stream(
        model, ids, arguments.tokens, state=state, decode=lambda row: bytes(row).decode(errors="replace"),
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty, stop=arguments.stop, seed=arguments.seed,
    ):  # fmt: skip
        writer.write(int(step.ids))
    writer.finish()
    if arguments.save_state:
        if step is None:
            raise ValueError("--save-state needs at least one generated token; raise --tokens")
        with torch.no_grad():
            _, after = model(step.ids.unsqueeze(1), step.state)
        after.save(arguments.save_state)
        print(f"state saved to {arguments.save_state}; go on with --state {arguments.save_state}", file=sys.stderr)
    return 0


class ByteWriter:
    """Writes bytes as text as soon as a character is complete."""

    def __init__(self) -> None:
        import codecs

        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, byte: int) -> None:
        sys.stdout.write(self.decoder.decode(bytes([byte])))
        sys.stdout.flush()

    def finish(self) -> None:
        print(self.decoder.decode(b"", final=True))
