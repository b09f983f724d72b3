# For an agent of one function (docs/bring-your-agent.md), run in a process of its own.
# Run: ROLLMESH_URL=http://127.0.0.1:8081/v1 ROLLMESH_TOKEN=... python examples/run_agent.py calculator:rollout
# Change first: the function, async def rollout(client, row) -> reward, in a file of the folder that PYTHONPATH names.

import asyncio
import os
import pkgutil
import sys

from openai import APIConnectionError, APIStatusError, AsyncOpenAI


async def work(mesh, rollout):
    while True:
        try:
            row = await mesh.post("/sessions", cast_to=object, body={})
            try:
                result = {"reward": await rollout(mesh.with_options(api_key=row["api_key"]), row)}
            except Exception as error:  # of this session only
                result = {"error": repr(error)[:2000]}
                print(f"{row['id']}: {error!r}", file=sys.stderr)
            await mesh.post(f"/sessions/{row['id']}/reward", cast_to=object, body=result)
        except (APIConnectionError, APIStatusError) as error:
            if not isinstance(error, APIStatusError) or error.code == "run_complete":
                return  # the run has ended
            if error.status_code not in (404, 410):  # otherwise the session is gone: take another one
                raise


async def main(name):
    mesh = AsyncOpenAI(base_url=os.environ["ROLLMESH_URL"], api_key=os.environ["ROLLMESH_TOKEN"], max_retries=20)
    await asyncio.gather(*(work(mesh, pkgutil.resolve_name(name)) for _ in range(16)))


asyncio.run(main(sys.argv[1]))
