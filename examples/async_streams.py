"""Stream several texts at the same time, from an engine in a process of its own.

python examples/async_streams.py [MODEL]
"""

import asyncio
import sys

from serve_spec import AsyncLLM, SamplingParams

PROMPTS = {"fibonacci": "def fibonacci(n):", "stack": "class Stack:\n    def __init__(self):"}


async def stream(llm: AsyncLLM, name: str, prompt: str) -> None:
    """Print a text, and in how many outputs it came: a round may give several tokens."""
    num_outputs, text, num_tokens = 0, "", 0
    async for out in llm.generate(prompt, SamplingParams(max_tokens=48, temperature=0), name):
        num_outputs += 1
        text, num_tokens = out.outputs[0].text, len(out.outputs[0].token_ids)  # so far
    print(f"{prompt}{text}\n# {name}: {num_tokens} tokens in {num_outputs} outputs")


async def main(model: str = "asset:tiny") -> None:
    """Run all prompts together; the engine batches them."""
    async with AsyncLLM(model) as llm:
        await asyncio.gather(*(stream(llm, *named) for named in PROMPTS.items()))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
