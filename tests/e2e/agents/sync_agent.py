"""The agent of the page with the synchronous client, in threads; the second half of its workers streams."""

import json
import os
import sys
import threading

from calculator import CALCULATE, calculate, score
from openai import APIConnectionError, APIStatusError, OpenAI

TOOLS = [{"type": "function", "function": CALCULATE}]


def whole(client, row, messages):
    return client.chat.completions.create(model=row["model"], messages=messages, tools=TOOLS).choices[0].message


def streamed(client, row, messages):
    with client.chat.completions.stream(model=row["model"], messages=messages, tools=TOOLS) as stream:
        return stream.get_final_completion().choices[0].message


def rollout(client, row, answer):
    messages = list(row["messages"])
    for _ in range(3):
        message = answer(client, row, messages)
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in message.tool_calls or []:
            result = calculate(str(json.loads(call.function.arguments).get("expression")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    return score(row, message.content)


def work(mesh, answer):
    while True:
        try:
            row = mesh.post("/sessions", cast_to=object, body={})
            reward = rollout(mesh.with_options(api_key=row["api_key"]), row, answer)
            mesh.post(f"/sessions/{row['id']}/reward", cast_to=object, body={"reward": reward})
        except (APIConnectionError, APIStatusError) as error:
            if not isinstance(error, APIStatusError) or error.code == "run_complete":
                return
            if error.status_code not in (404, 410):
                raise


def fail(problem):
    sys.__excepthook__(problem.exc_type, problem.exc_value, problem.exc_traceback)
    os._exit(1)


threading.excepthook = fail
mesh = OpenAI(base_url=os.environ["ROLLMESH_URL"], api_key=os.environ["ROLLMESH_TOKEN"], max_retries=20)
threads = [threading.Thread(target=work, args=(mesh, answer)) for answer in (whole, streamed) * 6]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
