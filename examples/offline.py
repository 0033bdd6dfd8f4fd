"""Complete prompts in this process, with and without speculation.

python examples/offline.py [MODEL]
"""

import sys
from dataclasses import replace

from serve_spec import LLM, SamplingParams, SpeculativeOptions

PROMPTS = ["def fibonacci(n):", "class Stack:\n    def __init__(self):"]


def main(model: str = "asset:tiny") -> None:
    """Print each text, and how many tokens a round gave; speculation changes no text."""
    llm = LLM(model)
    drafting = SamplingParams(max_tokens=64, temperature=0)
    plain = replace(drafting, speculative=SpeculativeOptions(enabled=False))
    for prompt in PROMPTS:
        drafted = llm.generate(prompt, drafting)[0]
        undrafted = llm.generate(prompt, plain)[0]
        print(prompt + drafted.text)
        print(f"# {drafted.speculation.accept_length:.2f} tokens a round, ", end="")
        print("the same text" if drafted.text == undrafted.text else "another text")


if __name__ == "__main__":
    main(*sys.argv[1:])
