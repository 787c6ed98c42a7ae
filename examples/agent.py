"""A program that speaks OpenAI's API and knows nothing of training: a loop with a tool, as many agents are."""

import json

import openai

from fp8rl import Problem

ADD = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


async def solve(base_url: str, api_key: str, problem: Problem, most: int = 3) -> dict[str, float]:
    right = "#### " + problem.answer.rpartition("####")[2].strip()
    messages = [{"role": "user", "content": problem.question}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(1, most + 1):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[{"type": "function", "function": ADD}], max_tokens=20
            )
            message = answer.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                result = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
            if not message.tool_calls:
                if (message.content or "").endswith(right):
                    return {"reward": 1.0 / turn, "turns": turn}
                messages.append({"role": "user", "content": problem.question})
    return {"reward": 0.0, "turns": most}
