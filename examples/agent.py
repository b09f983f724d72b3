# For countdown puzzles with two tries: each session of this agent becomes a trajectory of the run.
# Run, beside agent.yaml: ROLLMESH_URL=http://127.0.0.1:8081/v1 ROLLMESH_TOKEN=... python examples/agent.py
# Change first: episode(), which samples from the policy and returns the reward of a session.

import asyncio
import os

from openai import APIConnectionError, APIStatusError, AsyncOpenAI

client = AsyncOpenAI(base_url=os.environ["ROLLMESH_URL"], api_key=os.environ["ROLLMESH_TOKEN"], max_retries=20)


def solved(task, text):  # the last trial counts: "... , 8 + 3 = 11 ~ 11 = 0 !"
    words = text.rsplit(",", 1)[-1].split()
    if len(words) != 10 or words[-1] != "!" or not (words[0] + words[2]).isdigit():
        return False
    a, b = int(words[0]), int(words[2])
    return {a, b} <= set(task["numbers"]) and a != b and task["target"] == (a + b if words[1] == "+" else a - b)


async def episode(session):
    context = session["prompt_token_ids"]
    for reward in (1.0, 0.5):
        answer = await client.completions.create(
            model=session["model"],
            prompt=context,
            max_tokens=100,
            extra_body={"return_token_ids": True},
            extra_headers={"X-Rollmesh-Session": session["id"]},
        )
        if solved(session["task"], answer.choices[0].text):
            return reward
        context = [*context, *answer.choices[0].token_ids, *session["prompt_token_ids"]]  # ask again
    return 0.0


async def work():
    while True:
        try:
            session = await client.post("/sessions", cast_to=object, body={})
            body = {"reward": await episode(session)}
            await client.post(f"/sessions/{session['id']}/reward", cast_to=object, body=body)
        except (APIConnectionError, APIStatusError) as error:
            if not isinstance(error, APIStatusError) or error.code == "run_complete":
                return  # the run has ended
            if error.status_code not in (404, 410):  # otherwise the session is gone: take another one
                raise


async def main():
    await asyncio.gather(*(work() for _ in range(16)))


asyncio.run(main())
