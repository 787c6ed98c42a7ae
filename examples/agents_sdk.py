"""An agent of OpenAI's Agents SDK with a tool: a program of its own, which knows nothing of training.

It finds OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment and a problem on its standard input.
With `--stream` it asks for streams.
"""

import asyncio
import json
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def main() -> None:
    set_tracing_disabled(True)  # it would send what is said to OpenAI
    agent = Agent(
        name="calculator", model=OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], AsyncOpenAI()), tools=[add]
    )
    question = json.load(sys.stdin)["question"]
    if "--stream" in sys.argv:
        result = Runner.run_streamed(agent, question, max_turns=4)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, question, max_turns=4)
    print(result.final_output)


asyncio.run(main())
