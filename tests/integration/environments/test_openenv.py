"""Episodes of real OpenEnv servers, and servers that fail or do not keep to the protocol."""

import asyncio
import json

import numpy as np
import pytest
from aiohttp import web

from rollmesh.errors import ConfigError, DataError
from rollmesh.tasks.environments.environment_protocol import EnvironmentFailed, EnvironmentReply, environment_factory
from rollmesh.tasks.environments.openenv import OpenEnvFailed
from rollmesh.types import Prompt

from ...kit.openenv_server import openenv_server
from .documented import documented


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with openenv_server(tmp_path_factory.mktemp("openenv")) as running:
        yield running


def prompt(prompt_id="p", **metadata):
    return Prompt(prompt_id=prompt_id, token_ids=np.array([1], np.int32), verifier="", metadata=metadata)


class Episode:
    """An episode from its reset to its close."""

    def __init__(self, url, row=None, **options):
        self.environment = environment_factory("openenv", {"url": url, **options})()
        self.row = row or prompt(seed=4217)

    async def __aenter__(self):
        try:
            self.first = await self.environment.reset(self.row)
        except BaseException:
            await self.environment.aclose()
            raise
        return self

    async def __aexit__(self, *_):
        await self.environment.aclose()

    async def say(self, text):
        return await self.environment.step(text, "t:0:d")


@pytest.mark.parametrize(("reward", "rewards"), [("sum", [0.0, -0.25, -0.5, 0.5]), ("last", [0.0, -0.25, -0.25, 1.0])])
async def test_an_episode_of_steps_has_the_texts_and_the_rewards_of_the_server(server, reward, rewards):
    async with Episode(f"{server.url}/hunt", prompt(seed=32), reward=reward, reply="\n{text}: ") as episode:
        replies = [episode.first, *[await episode.say(text) for text in ("50", " 41\n", "42")]]
    texts = ["Guess a number from 10 to 99.", "\nlower: ", "\nhigher: ", "\nhit: "]
    assert [reply.text for reply in replies] == texts
    assert [reply.reward for reply in replies] == rewards
    assert [reply.done for reply in replies] == [False, False, False, True]


async def test_all_members_of_a_group_begin_alike_and_a_row_gives_arguments_of_the_reset(server):
    async def replies(row):
        async with Episode(f"{server.url}/hunt", row, reset_fields=["low"]) as episode:
            return [episode.first.text, *[(await episode.say(str(guess))).text for guess in range(90, 100)]]

    one, other = [await replies(prompt("e0-1", low=90)) for _ in range(2)]
    assert one == other and one[0] == "Guess a number from 90 to 99." and "hit" in one
    with pytest.raises(DataError, match="reset_fields: p has no low, but level"):
        await replies(prompt(level=1))


def call(name, **arguments):
    return f"I use a tool.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_tools_are_shown_and_called_by_steps_whose_reward_counts(server):
    async with Episode(f"{server.url}/sums", action="tool", first="Tools:\n{tools}{text}") as episode:
        header, *lines, task = episode.first.text.split("\n")
        tools = [json.loads(line)["function"] for line in lines]
        assert (header, task) == ("Tools:", "Add 42 and 17.")
        assert [tool["name"] for tool in tools] == ["add", "submit"]
        assert tools[0]["parameters"]["required"] == ["a", "b"]
        assert await episode.say(call("add", a=42, b=17)) == EnvironmentReply(text="59", done=False, reward=0.0)
        assert (await episode.say(call("subtract", a=1))).text == "error: Unknown tool: 'subtract'"
        assert (await episode.say(call("add", a="many"))).text.startswith("error: 2 validation errors")
        for broken in ("<tool_call>{", '<tool_call>{"name": }</tool_call>', '<tool_call>{"name": 3}</tool_call>'):
            told = await episode.say(broken)
            assert told.text.startswith("error: ") and not told.done
        assert await episode.say(call("submit", total=59)) == EnvironmentReply(text="thanks", done=True, reward=1.0)


async def test_an_episode_of_tools_ends_with_a_turn_without_a_call_and_with_the_reward_so_far(server):
    async with Episode(f"{server.url}/sums", action="tool") as episode:
        assert await episode.say("It is 59.") == EnvironmentReply(text="", done=True, reward=0.0)


async def test_tools_are_called_by_mcp_and_the_last_answer_is_a_step(server):
    async with Episode(f"{server.url}/desk", action="mcp") as episode:
        assert '"add"' in episode.first.text
        assert (await episode.say(call("add", a=42, b=17))).text == "59"
        assert (await episode.say(call("subtract"))).text == "error: Unknown tool: 'subtract'"
        assert await episode.say("59") == EnvironmentReply(text="ended", done=True, reward=1.0)


async def test_an_action_is_json_or_in_a_tag_and_what_cannot_be_read_is_told_or_ends_the_episode(server):
    async with Episode(f"{server.url}/hunt", prompt(seed=32), action="json", tag="act") as episode:
        assert (await episode.say('so <act>{"message": "42"}</act>')).reward == 1.0
        assert (await episode.say("42")).text == "error: no <act>...</act> in the turn"
        assert (await episode.say("<act>[42]</act>")).text == "error: the action is not a JSON object"
        assert "Field required" in (await episode.say('<act>{"guess": 42}</act>')).text
    async with Episode(f"{server.url}/hunt", action="json", ends_unread=True) as episode:
        assert (await episode.say("forty-two")).done


async def test_the_environment_that_the_package_writes_echoes_and_its_one_session_is_waited_for(server):
    url, options = f"{server.url}/echo", {"observation": "echoed_message"}
    async with Episode(url, **options) as episode:
        assert episode.first.text == "Echo Words environment ready!"
        assert await episode.say("hello") == EnvironmentReply(text="hello", done=False, reward=0.5)
        with pytest.raises(OpenEnvFailed, match="all sessions were taken for 0.2 s.*max_concurrent_envs") as full:
            await Episode(url, capacity_seconds=0.2, **options).__aenter__()
        assert full.value.code == "CAPACITY_REACHED"
        waiting = asyncio.create_task(Episode(url, capacity_seconds=300, **options).__aenter__())
    later = await waiting
    assert (await later.say("two")).text == "two"
    await later.environment.aclose()
    async with Episode(url, capacity_seconds=300) as episode:
        assert json.loads(episode.first.text)["echoed_message"] == "Echo Words environment ready!"
    with pytest.raises(EnvironmentFailed, match="has no 'words', but .*echoed_message"):
        await Episode(url, observation="words", capacity_seconds=300).__aenter__()


async def test_the_documented_run_plays(server):
    options = documented("openenv")[0]
    async with Episode(**{**options, "url": f"{server.url}/echo", "row": prompt(level=3)}) as episode:
        assert (await episode.say("hello")).text == "hello"


async def test_what_an_environment_does_not_take_is_told_and_other_errors_end_the_episode(server):
    async with Episode(f"{server.url}/hunt", prompt(seed=32)) as episode:
        told = await episode.say("many")
        assert told.text == "error: step: invalid literal for int() with base 10: 'many'" and not told.done
        assert (await episode.say("42")).done
    with pytest.raises(OpenEnvFailed, match="reset: .*NoneType") as failed:
        await Episode(f"{server.url}/hunt", prompt(low=None), reset_fields=["low"]).__aenter__()
    assert failed.value.code == "EXECUTION_ERROR"
    with pytest.raises(OpenEnvFailed, match="Field required") as refused:
        async with Episode(f"{server.url}/hunt", field="guess") as episode:
            await episode.say("1")
    assert refused.value.code == "VALIDATION_ERROR"
    with pytest.raises(EnvironmentFailed, match="lists no tools: .*does not support MCP"):
        await Episode(f"{server.url}/hunt", action="tool").__aenter__()


async def test_an_environment_that_never_answers_holds_up_no_other_and_not_its_own_end(server):
    async with Episode(f"{server.url}/hunt") as hanging:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await hanging.say("sleep")
        async with Episode(f"{server.url}/hunt", prompt(seed=32)) as other:
            assert (await other.say("42")).done


async def test_a_server_that_is_killed_in_an_episode_ends_it_with_a_typed_error(server):
    async with Episode(f"{server.url}/hunt") as episode:
        await episode.say("50")
        server.kill()
        with pytest.raises(OpenEnvFailed, match="the episode is lost") as lost:
            await episode.say("60")
        assert lost.value.code == "CLOSED"
    with pytest.raises(OpenEnvFailed) as gone:
        await Episode(f"{server.url}/hunt").__aenter__()
    assert gone.value.code == "UNREACHABLE"
    assert isinstance(gone.value.__cause__, OSError), "a trial takes it for a service that starts later"
    server.start(server.port)
    async with Episode(f"{server.url}/hunt", prompt(seed=32)) as episode:
        assert (await episode.say("42")).done


SEEN = {"type": "observation", "data": {"observation": {"text": "hi"}, "reward": None, "done": False}}


@pytest.fixture
async def scripted():
    """A server whose answers to each message are the next list of a script."""
    runners = []

    async def serve(*answers):
        async def handle(request):
            socket, script = web.WebSocketResponse(), iter(answers)
            await socket.prepare(request)
            async for _ in socket:
                for answer in next(script, []):
                    await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
            return socket

        app = web.Application()
        app.router.add_get("/ws", handle)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield serve
    for runner in runners:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("answers", "code", "words"),
    [
        ([[SEEN], [{"type": "state", "data": {}}]], "OUT_OF_ORDER", "answers to a step by a message 'state'"),
        ([[SEEN], ["no JSON"]], "OTHER_PROTOCOL", "'no JSON' is no answer of OpenEnv 0.10 to a step"),
        ([["[1]"]], "OTHER_PROTOCOL", "no answer of OpenEnv 0.10 to a reset"),
        ([[{"type": "observation", "data": {"text": "hi"}}]], "OTHER_PROTOCOL", "no answer of OpenEnv 0.10"),
        ([[{"type": "error", "data": {"message": "Unknown", "code": "UNKNOWN_TYPE"}}]], "UNKNOWN_TYPE", "Unknown"),
    ],
)
async def test_a_server_that_breaks_the_protocol_is_named_with_what_it_said(scripted, answers, code, words):
    url = await scripted(*answers)
    with pytest.raises(OpenEnvFailed, match=words) as failed:
        async with Episode(url) as episode:
            await episode.say("1")
    assert failed.value.code == code


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "localhost:8000"}, "options.url: 'localhost:8000': expected http://HOST:PORT"),
        ({"action": "click"}, "options.action: 'click' is none of text, json, tool, mcp"),
        ({"reward": "first"}, "options.reward: 'first' is none of sum, last, verifier"),
        ({"reply": "next"}, "options.reply: 'next' must contain {text}"),
        ({"tag": "a b"}, "options.tag: 'a b' must be an identifier"),
        ({"speed": 3}, "rejects .*speed"),
    ],
)
def test_a_wrong_option_is_named(options, words):
    with pytest.raises(ConfigError, match=words):
        environment_factory("openenv", {"url": "http://127.0.0.1:1", **options})
