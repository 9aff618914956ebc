# SPDX-License-Identifier: Apache-2.0
"""What a stack's clients ask, through the official client, and how an answer is judged."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import openai

from experiments.common.client import at_a_time

TOKENS = 16
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
"""The experiments' model has no chat template."""
STEP_SECONDS = 150.0
AT_ONCE = 8
TOLERANCE_NATS = 0.001
"""The log-probabilities of one server differ by less, in other batches."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 6}},
    "required": ["word"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


@dataclass(frozen=True)
class Answer:
    """Text, the log-probability of each token where it was asked for, and why it ended; None if it did not say.

    ``cached_tokens``: of the prompt, by ``usage``, if the answer was not streamed.
    """

    text: str
    logprobs: tuple[float, ...]
    finish_reason: str | None
    cached_tokens: int = 0


class Verdict(enum.Enum):
    RIGHT = "right"
    WRONG = "wrong"
    ERROR = "error before the first token"
    BROKEN = "error in a stream that had begun"
    CUT_SHORT = "cut short"
    """A stream that ended without a reason, and whose text is right so far."""
    NO_END = "no end"


Request = tuple[str, int]
"""(kind, number): each has a prompt of its own."""


class BrokenOff(openai.OpenAIError):
    """A stream that had begun ended with an error. ``text`` is what came before."""

    def __init__(self, text: str) -> None:
        super().__init__("the stream broke off")
        self.text = text


class Judged(NamedTuple):
    """A verdict, and the answer if there was one."""

    verdict: Verdict
    request: Request
    found: Answer | None = None


def counted(answers: Sequence[Judged]) -> dict[str, int]:
    """Return how many answers have each verdict, by its words."""
    return {kind.value: number for kind in Verdict if (number := sum(one.verdict is kind for one in answers))}


LETTERS = range(40, 48)
"""Tokens of the experiments' model that are letters of ASCII."""
SPACES = (199, 200, 203, 222)
"""Its tokens for tab, line feed, carriage return and space."""
Ask = Callable[[Any, int], Awaitable[Answer]]


def _numbers(number: int, kind: int) -> list[int]:
    """A prompt that shares no block with any other.

    It ends with letters: vLLM begins the answer's text in the prompt where that ends inside a character.
    """
    rest = [3 + (7 * place + 31 * number + 101 * kind) % 500 for place in range(100 + 40 * (number % 6))]
    return [3 + number, 203 + kind, *rest, *LETTERS]


async def _streamed(answer: Any, text_of: Callable[[Any], str | None]) -> Answer:
    choices: list[Any] = []
    try:
        async for part in answer:
            choices += part.choices[:1]
    except openai.OpenAIError as error:
        if not choices:
            raise
        raise BrokenOff("".join(text_of(one) or "" for one in choices)) from error
    logprobs = tuple(float(p) for one in choices if one.logprobs for p in one.logprobs.token_logprobs)
    text = "".join(text_of(one) or "" for one in choices)
    return Answer(text, logprobs, choices[-1].finish_reason if choices else None)


async def _complete(client: Any, number: int, *, stream: bool) -> Answer:
    asked = {"model": "model", "prompt": _numbers(number, 1 + stream), "max_tokens": TOKENS, "temperature": 0}
    answer = await client.completions.create(**asked, logprobs=1, stream=stream, extra_body={"ignore_eos": True})
    if stream:
        return await _streamed(answer, lambda one: one.text)
    one = _only(answer)
    return Answer(one.text, tuple(map(float, one.logprobs.token_logprobs)), one.finish_reason, _cached(answer))


async def _chat(client: Any, number: int, *, stream: bool) -> Answer:
    # Streams without log-probabilities: vLLM leaves out those of tokens that end inside a character, as it happens.
    more = {"stream": True} if stream else {"logprobs": True}
    asked = _asked_of_chat(number, 3 + stream, TOKENS)
    answer = await client.chat.completions.create(**asked, **more, extra_body={"ignore_eos": True})
    if stream:
        return await _streamed(answer, lambda one: one.delta.content)
    one = _only(answer)
    logprobs = tuple(each.logprob for each in one.logprobs.content)
    return Answer(one.message.content, logprobs, one.finish_reason, _cached(answer))


async def _tool(client: Any, number: int) -> Answer:
    """A call of a tool, whose arguments a grammar constrains."""
    answer = await client.chat.completions.create(
        **_asked_of_chat(number, 5, 128),
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "look_up"}},
        # Otherwise it says spaces between the tokens of JSON until it is cut off.
        logit_bias=dict.fromkeys(map(str, SPACES), -100),
    )
    one = _only(answer)
    calls = [f"{call.function.name}({call.function.arguments})" for call in one.message.tool_calls or ()]
    # Stacks that read calls of tools themselves say "tool_calls" where vLLM says "stop".
    return Answer(" ".join(calls) or one.message.content, (), "tool_calls" if calls else one.finish_reason)


async def _tool_by_schema(client: Any, number: int) -> Answer:
    """What a stack says to `_tool` that asks vLLM for the tool's arguments only, by their schema."""
    response_format = {"type": "json_schema", "json_schema": {"name": "arguments", "schema": SCHEMA}}
    answer = await client.chat.completions.create(**_asked_of_chat(number, 5, 128), response_format=response_format)
    return Answer(f"look_up({_only(answer).message.content})", (), "tool_calls")


def _asked_of_chat(number: int, kind: int, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": " ".join(map(str, _numbers(number, kind)[:60]))}]
    return {"model": "model", "messages": messages, "max_completion_tokens": max_tokens, "temperature": 0}


def _only(answer: Any) -> Any:
    """Return the choice of an answer. Some routers pass on an error as if it were one."""
    if not answer.choices:
        raise openai.OpenAIError(f"found {answer}; expected an answer with a choice")
    (one,) = answer.choices
    return one


def _cached(answer: Any) -> int:
    details = answer.usage and answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


KINDS: dict[str, Ask] = {
    "completion": lambda client, number: _complete(client, number, stream=False),
    "completion, streamed": lambda client, number: _complete(client, number, stream=True),
    "chat": lambda client, number: _chat(client, number, stream=False),
    "chat, streamed": lambda client, number: _chat(client, number, stream=True),
    "tool": _tool,
}
BY_SCHEMA = "tool, by schema"
"""Asked of the stock instance only, with the prompt of "tool"."""


def requests(rounds: Sequence[int]) -> list[Request]:
    return [(kind, number) for number in rounds for kind in KINDS]


def expected_behind(answers: dict[Request, Answer], *, constrains_tools_itself: bool) -> dict[Request, Answer]:
    """Return what a stack has to say to `requests`, from the stock instance's answers."""
    found = {request: answer for request, answer in answers.items() if request[0] in KINDS}
    if constrains_tools_itself:
        found |= {("tool", number): answer for (kind, number), answer in answers.items() if kind == BY_SCHEMA}
    return found


def client_of(url: str) -> Any:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=STEP_SECONDS)


async def ask(client: Any, request: Request) -> Answer:
    """Raises `openai.OpenAIError` if the answer is an error, or none came in time."""
    kind, number = request
    return await (_tool_by_schema if kind == BY_SCHEMA else KINDS[kind])(client, number)


async def answers(url: str, asked: Sequence[Request]) -> dict[Request, Answer]:
    """Return what a server says to each request, one at a time. Raises openai.OpenAIError if that is an error."""
    async with client_of(url) as client:
        return {request: await ask(client, request) for request in asked}


def judged(found: Answer, expected: Answer) -> Verdict:
    if found.finish_reason is None and expected.text.startswith(found.text):
        return Verdict.CUT_SHORT
    near = len(found.logprobs) == len(expected.logprobs) and all(
        abs(one - other) < TOLERANCE_NATS for one, other in zip(found.logprobs, expected.logprobs, strict=True)
    )
    same = (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
    return Verdict.RIGHT if same and near else Verdict.WRONG


async def judge(client: Any, request: Request, expected: Answer) -> Judged:
    try:
        found = await asyncio.wait_for(ask(client, request), STEP_SECONDS)
    except (TimeoutError, asyncio.TimeoutError, openai.APITimeoutError):
        return Judged(Verdict.NO_END, request)
    except BrokenOff as error:
        # What came before the error must be right, too.
        return Judged(Verdict.BROKEN if expected.text.startswith(error.text) else Verdict.WRONG, request)
    except openai.OpenAIError:
        return Judged(Verdict.ERROR, request)
    return Judged(judged(found, expected), request, found)


async def many(url: str, expected: dict[Request, Answer]) -> list[Judged]:
    """Ask everything once, `AT_ONCE` at a time."""
    async with client_of(url) as client:
        return await at_a_time(AT_ONCE, (judge(client, *each) for each in expected.items()))


async def meanwhile(
    url: str, asked: Sequence[tuple[Request, Answer]], trouble: Callable[[], None], at_once: int = 4
) -> list[Judged]:
    """Ask on and on, ``at_once`` requests at a time, while ``trouble`` runs in a thread."""
    found: list[Judged] = []
    troubled = asyncio.create_task(asyncio.to_thread(trouble))

    async def one(client: Any, place: int) -> None:
        while not troubled.done():
            place = (place + 1) % len(asked)
            found.append(await judge(client, *asked[place]))
            if found[-1].verdict is Verdict.ERROR:
                await asyncio.sleep(0.2)

    async with client_of(url) as client:
        await asyncio.gather(*(one(client, number * len(asked) // at_once) for number in range(at_once)))
    await troubled
    return found
