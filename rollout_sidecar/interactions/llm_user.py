"""A language model that plays the user, behind an OpenAI-compatible endpoint (POST <base_url>/chat/completions).

    interaction:
      - name: customer
        class_name: rollout_sidecar.interactions.llm_user.LlmUserInteraction
        config:
          base_url: http://127.0.0.1:8001/v1
          model: qwen2.5-7b-instruct
          api_key_env: OPENAI_API_KEY      # name of the environment variable that holds the key; absent: no key
          system_prompt: |                 # Jinja; the variables are the task's interaction_kwargs
            You are a customer. {{ goal }} When you have what you want, say {{ done_marker }}.
          done_marker: "###DONE###"        # in the model's text: the conversation is over
          done_score: 0.0                  # score of the turn that it ends with
          max_tokens: 256
          temperature: 1.0
          seed: 0                          # sent along; absent: the endpoint chooses
          timeout_s: 30                    # of one request
          retries: 2                       # after 429, 5xx and lost connections
          opening: Hi! How can I help you? # what the model is told to answer with the task's first message; "": nothing
          extra_body: {}                   # more fields of the request

The model sees the conversation from the other side: what the policy said is its user, what the user said is itself.
Tools, thinking and system messages of the policy are not shown to it.
"""

import asyncio
import os
import re
from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.sandbox

from rollout_sidecar.errors import InteractionError
from rollout_sidecar.interactions.base import BaseInteraction
from rollout_sidecar.protocol import Message
from rollout_sidecar.tools.http import (
    HttpClient,
    HttpFailure,
    checked_url,
    positive_count,
    positive_seconds,
)

FIRST_PAUSE_S = 0.25
"""Before the first retry, unless the endpoint says how long; doubled for each further one."""

SYSTEM_PROMPT = """\
You play a user who talks to an assistant. Stay in that role: write only what the user would say, one short message.
{% for key, value in task.items() %}
{{ key }}: {{ value }}
{%- endfor %}

When the assistant has done what you wanted, or cannot, say {{ done_marker }}."""
"""Where the config has none: `task` holds all of interaction_kwargs."""

_THINKING = re.compile(r"^.*</think>", re.DOTALL)


class LlmUserInteraction(BaseInteraction):
    """Asks a chat endpoint what the user says next. Keeps nothing but each conversation's system prompt."""

    config_keys = (
        *("base_url", "model", "api_key_env", "system_prompt", "done_marker", "done_score"),
        *("max_tokens", "temperature", "seed", "timeout_s", "retries", "opening", "extra_body"),
    )

    def __init__(self, config: dict[str, Any]):
        """ValueError names a setting that is missing or out of range."""
        super().__init__(config)
        config = {key: value for key, value in config.items() if value is not None}
        base_url = checked_url(config.get("base_url"), "base_url")
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        if not config.get("model"):
            raise ValueError("model is missing (the name under which the endpoint serves it)")
        self._body: dict[str, Any] = {
            "model": config["model"],
            "max_tokens": positive_count(config, "max_tokens", 256),
            "temperature": float(config.get("temperature", 1.0)),
            **({"seed": int(config["seed"])} if "seed" in config else {}),
            **config.get("extra_body", {}),
        }
        self._marker = str(config.get("done_marker", "###DONE###"))
        if not self._marker:
            raise ValueError("done_marker is empty: the conversation could never end by it")
        self._done_score = float(config.get("done_score", 0.0))
        self._timeout_s = positive_seconds(config, "timeout_s", default=30.0)
        self._retries = int(config.get("retries", 2))
        self._opening = str(config.get("opening", "Hi! How can I help you?"))
        self._prompt = _template(str(config.get("system_prompt", SYSTEM_PROMPT)))
        key = _key(config.get("api_key_env", ""))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = HttpClient(headers=headers, secrets=(key,))
        self._systems: dict[str, str] = {}

    async def startup(self) -> None:
        """Opens the connection pool."""
        await self._http.open()

    async def shutdown(self) -> None:
        """Closes it."""
        await self._http.close()

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Fills in the system prompt. ValueError names a variable that the task lacks."""
        started = await super().start_interaction(instance_id)
        variables = {**kwargs, "task": kwargs, "done_marker": self._marker}
        try:
            self._systems[started] = self._prompt.render(variables)
        except jinja2.UndefinedError as error:
            raise ValueError(
                f"system_prompt: interaction_kwargs has {sorted(kwargs)}: {error}"
            ) from error
        return started

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """What the user says next. InteractionError if the endpoint cannot be brought to say it."""
        shown = other_side(messages, self._systems[instance_id], self._opening)
        text = _said(await self._request({**self._body, "messages": shown}))
        done = self._marker in text
        text = text.replace(self._marker, "").strip()
        return done, text, self._done_score if done else 0.0, {}

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Forgets the conversation."""
        self._systems.pop(instance_id or "", None)

    async def _request(self, body: dict[str, Any]) -> Any:
        for attempt in range(self._retries + 1):
            try:
                return await self._http.request_json(
                    "POST", self._url, timeout_s=self._timeout_s, body=body
                )
            except HttpFailure as failure:
                temporary = failure.status == 429 or failure.status >= 500
                lost = failure.fault in ("refused", "timeout", "broken")
                if attempt == self._retries or not (temporary or lost):
                    raise InteractionError(str(failure)) from failure
                await asyncio.sleep(max(FIRST_PAUSE_S * 2**attempt, failure.retry_after_s))
        raise AssertionError("the last attempt returns or raises")


def other_side(messages: Sequence[Message], system: str, opening: str) -> list[dict[str, str]]:
    """The conversation as the user's model sees it: roles exchanged, turns that called tools left out, and runs of one
    role joined, since many templates want user and assistant to take turns."""
    shown = [{"role": "system", "content": system}]
    if opening:
        shown.append({"role": "user", "content": opening})
    for message, following in zip(messages, [*messages[1:], {}], strict=True):
        called = following.get("role") == "tool"
        role = {"user": "assistant", "assistant": "user"}.get(str(message.get("role")))
        if role is None or called:
            continue
        text = _text(message.get("content"))
        text = _THINKING.sub("", text).strip() if role == "user" else text
        if shown[-1]["role"] == role:
            shown[-1]["content"] += f"\n\n{text}"
        else:
            shown.append({"role": role, "content": text})
    return shown


def _text(content: Any) -> str:
    """The text of a message, whose content may be a list of parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _said(answer: Any) -> str:
    """The message in an answer of the endpoint."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise InteractionError(
            f"the endpoint answered without choices[0].message.content: {str(answer)[:200]}"
        ) from None
    return _THINKING.sub("", _text(content)).strip()


def _template(text: str) -> jinja2.Template:
    environment = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"system_prompt is no template: {error}") from error


def _key(variable: Any) -> str:
    """The key in an environment variable. ValueError if it is named and not set."""
    if not variable:
        return ""
    key = os.environ.get(str(variable), "")
    if not key:
        raise ValueError(f"api_key_env={variable!r} names an environment variable that is not set")
    return key
