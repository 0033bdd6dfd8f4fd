"""Chat with tools through OpenAI's client: the model calls a function of this program.

serve-spec serve MODEL        # in another terminal
python examples/chat_with_tools.py [URL]
"""

import json
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "population",
            "description": "Return the number of people who live in a city.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Lima", "Oslo", "Quito"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def population(city: str) -> int:
    """Return what the model may ask for."""
    return {"Lima": 10_092_000, "Oslo": 717_710, "Quito": 1_978_376}[city]


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Let the model call the function, tell it the result, and print its answer."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "How many people live in Oslo?"}]
    # "required": small models rarely call by themselves. "auto" lets the model decide.
    asked = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="required", temperature=0
    )
    message = asked.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        result = population(**arguments)
        print(f"population({arguments['city']}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=64
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
