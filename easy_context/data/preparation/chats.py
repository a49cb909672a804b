"""Read chats from records, render them with the tokenizer's chat template, and find the answers in the text."""

import json
from dataclasses import dataclass
from typing import Any

from .spans import Span

FIELDS = ("messages", "conversations")  # lists of messages; the first that a record has is taken
OTHER_FIELDS = ("system", "tools")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | {
    role: role for role in ("user", "assistant", "system", "tool")
}


@dataclass(frozen=True)
class RenderedChat:
    """A chat up to its last answer that is learned.

    Attributes:
        text: text that the template produces.
        answers: learned answers, each with the template's end marker.
        left_out: number of answers that are not learned, because the template changes them when later turns follow.
    """

    text: str
    answers: list[Span]
    left_out: int


def render_chat(tokenizer: Any, data: dict[str, Any]) -> RenderedChat:
    """Render the chat of a record and find its answers.

    An answer is learned if the whole text begins with what the template gives to the model before that answer, and
    then with the answer as the model would write it. Templates that drop the thinking of earlier turns (Qwen3's) so
    leave the last answer only, in the context that it has when a model is asked.

    Args:
        tokenizer: with a chat template.
        data: a record with one of `FIELDS`.

    Raises:
        ValueError: no chat, no template, or a template after which the last answer cannot be found.
    """
    messages, tools = _messages(data), _tools(data)
    learned = _learned_turns(messages)
    messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    text = _render(tokenizer, messages[: learned[-1] + 1], tools)
    if tools and text == _render(tokenizer, messages[: learned[-1] + 1], None):
        raise ValueError("has 'tools', which the chat template leaves out")
    answers, done = [], 0
    for turn in learned:
        given = _render(tokenizer, messages[:turn], tools, generation_prompt=True)
        answered = _render(tokenizer, messages[: turn + 1], tools)
        if len(given) >= done and answered.startswith(given) and text.startswith(answered):
            answers.append(Span(len(given), len(answered)))
            done = len(answered)
        elif turn == learned[-1]:
            raise ValueError(
                "the chat template's prompt is not what stands before the last answer, so it has no labels"
            )
    return RenderedChat(text, answers, len(learned) - len(answers))


def _render(tokenizer: Any, messages: list[dict], tools: list | None, generation_prompt: bool = False) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
        )
    except Exception as error:  # jinja raises what the template's author chose
        raise ValueError(f"the chat template failed: {error}") from error


def _messages(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a record as {role, content} and more, ShareGPT's {from, value} included."""
    field = next(name for name in FIELDS if data.get(name) is not None)
    if not isinstance(data[field], list) or not data[field]:
        raise ValueError(f"{field!r} must be a list of {{role, content}} or {{from, value}}")
    messages = [_message(message) for message in data[field]]
    system = data.get("system")
    if system is not None and not isinstance(system, str):
        raise ValueError(f"field 'system' is {type(system).__name__}, not text")
    if system and system.strip():
        if messages[0]["role"] == "system":
            raise ValueError("has a message of role 'system' and also a field 'system'")
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(message: Any) -> dict[str, Any]:
    if isinstance(message, dict):  # in tables every message has all the fields that any has
        message = {key: value for key, value in message.items() if value is not None or key in ("content", "value")}
        if "from" in message and "role" not in message:
            if message["from"] not in SHAREGPT_ROLES:
                raise ValueError(f"a message from {message['from']!r}; known are {', '.join(SHAREGPT_ROLES)}")
            message = {**message, "role": SHAREGPT_ROLES[message["from"]], "content": message.get("value")}
            message = {key: value for key, value in message.items() if key not in ("from", "value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("a message has no role")
    if not isinstance(message.get("content"), str):
        raise ValueError(f"the content of a message of role {message['role']!r} is not text")
    return message


def _learned_turns(messages: list[dict[str, Any]]) -> list[int]:
    """Return the places of the assistant's messages, those of weight 0 left out."""
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("no message of role 'assistant', so nothing to learn")
    weights = [messages[turn].get("weight", 1) for turn in answers]
    if not set(weights) <= {0, 1}:
        raise ValueError(f"weights of messages must be 0 or 1: {weights}")
    if not any(weights):
        raise ValueError("every message of role 'assistant' has weight 0, so nothing to learn")
    return [turn for turn, weight in zip(answers, weights, strict=True) if weight]


def _tools(data: dict[str, Any]) -> list[dict] | None:
    """Return the tools of a record, a list or its JSON, for the template; None without any."""
    tools = data.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"field 'tools' is not JSON: {error}") from error
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("field 'tools' is not a list of tools")
    return tools or None
