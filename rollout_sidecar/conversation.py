"""The token-exact record of one conversation: what the policy saw and what it sampled, token by token.

Sampled ids are stored as the engine returned them and never go through text again. Messages are rendered when they
arrive. `loss_mask` is True exactly for ids that `append_completion` was given, so padding, separators and end-of-turn
tokens that were inserted here never count, and an end-of-sequence token that was sampled does, whatever its id.

Some chat templates write earlier turns differently once more messages follow: Qwen3's drops the thinking before the
last question. The context policy says what then happens.

- keep: nothing. New messages are rendered as the text that they add, and earlier turns stay as they were sampled.
- fork: the context becomes the template's text of the whole conversation, in a token stream of its own. The stream so
  far goes to `earlier_streams`. Each token is trained on in the context in which it was sampled.
- reject: `ContextRewrittenError`.

Where the template does not rewrite anything all three give the same tokens. `escaping` says what becomes of the texts
of control tokens inside messages.
"""

from collections.abc import Sequence
from typing import Any, Literal

from rollout_sidecar.errors import ContextRewrittenError, EngineError, boundary
from rollout_sidecar.escaping import Escaper, safe
from rollout_sidecar.formats.base import ParsedCall, ToolFormat
from rollout_sidecar.protocol import Message, TokenStream, VersionSpan
from rollout_sidecar.templates import chat_template, normalise
from rollout_sidecar.tokenizer import ChatTokenizer

ContextPolicy = Literal["keep", "fork", "reject"]


class Observation(list[int]):
    """The ids that `render_observation` gives: what follows the last turn, or a whole new context if `rewrites`."""

    def __init__(self, ids: Sequence[int], *, text: str, escaped: int = 0, rewrites: bool = False):
        super().__init__(ids)
        self.text = text
        """The same as text."""
        self.escaped = escaped
        """Control-token texts in the messages."""
        self.rewrites = rewrites
        """The ids replace the context instead of going on after it."""
        self.messages: list[Message] | None = None
        """What was rendered."""
        self.added: list[Message] = []
        """That, normal."""


class Conversation:
    """Grows by turns: append_completion, then append_observation, and so on."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        tool_format: ToolFormat,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        context_policy: ContextPolicy = "keep",
    ):
        """Renders the prompt. Raises ValueError if the chat template cannot.

        Args:
            messages: what the policy is asked; tool results, earlier turns and system messages may be among them.
            tools: OpenAI function schemas of the tools it may call. None and [] offer none.
        """
        if not messages:
            raise ValueError("a conversation needs at least one message")
        self._tokenizer = tokenizer
        self._format = tool_format
        self._template = chat_template(tokenizer, tool_format)
        self._schemas = self._template.schemas(list(tools or []))
        self.tools = self._schemas.tools
        """OpenAI function schemas of the tools that the policy may call. Shared: not to be changed."""
        self._policy = context_policy
        self._turn_texts: list[str] = []
        self._call_ids: list[str] | None = None  # of the last turn
        self._awaits_completion = True
        format_stops = {tokenizer.token_id(text) for text in tool_format.stop_texts} - {None}
        self._turn_end_ids = {tokenizer.end_of_turn_id, *format_stops}
        self.stop_ids: frozenset[int] = tokenizer.stop_ids | self._turn_end_ids  # type: ignore
        """Every id that ends a turn: the tokenizer's, and those after which this format waits for a result."""
        # A format's markers may be special tokens; calls in a turn's text need them.
        markers = {tokenizer.token_id(marker) for marker in tool_format.markers}
        self._unspoken = (tokenizer.special_ids | self.stop_ids) - markers

        self.messages: list[Message] = safe(list(messages))
        """The conversation as text."""
        self.prompt_messages = len(messages)
        """How many of them are the prompt."""
        self._history: list[Message] = normalise(messages)
        escaper = Escaper(tokenizer, tool_format)
        text = self._template.prompt(
            escaper.messages(self._history), self._schemas.escaped(escaper)
        )
        self.escaped_special_tokens = escaper.count
        """Control-token texts in messages and schemas, encoded as plain text."""
        self.earlier_streams: list[TokenStream] = []
        """Context policy fork: streams that have ended. The fields below are the current one's."""
        self._start_stream(escaper.encode(text))
        # What the current stream holds as text, which templates are compared with; policy keep compares nothing.
        self._context = escaper.plain(text)
        # Everything after the first prompt as if nothing had been rewritten.
        self._said: list[int] = []

    def _start_stream(self, ids: Sequence[int]) -> None:
        self.token_ids: list[int] = list(ids)
        """Prompt, completions and observations in the order the policy saw them."""
        self.prompt_tokens = len(self.token_ids)
        self.loss_mask: list[bool] = [False] * self.prompt_tokens
        """True exactly where the policy sampled the token."""
        self.rollout_log_probs: list[float] = [0.0] * self.prompt_tokens
        """0 where loss_mask is False."""
        self.version_spans: list[VersionSpan] = []
        """Which policy version sampled which tokens."""

    @property
    def stream(self) -> int:
        """Number of the current token stream: the `Turn.stream` of the turn that is sampled next, whose start and end
        count in `token_ids`."""
        return len(self.earlier_streams)

    @property
    def think_open(self) -> bool:
        """The generation prompt opens the thinking that the turn's text goes on with: give it to the format's parse."""
        return self._template.think_open

    # --- turns ---

    def append_completion(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        policy_version: int,
        version_spans: Sequence[VersionSpan] = (),
    ) -> str:
        """Appends a turn as it was sampled and returns its text, without special tokens.

        Its last id may be a stop id or not: what the template needs to close the turn comes with the next
        observation, with mask 0.

        Args:
            version_spans: positions in `ids` by policy version, where more than one version sampled them.
        """
        if len(ids) != len(log_probs):
            raise ValueError(f"{len(ids)} sampled ids came with {len(log_probs)} log-probs")
        if not self._awaits_completion:
            raise ValueError(
                "a completion follows a prompt or an observation, not another completion"
            )
        start = len(self.token_ids)
        if ids and not version_spans:
            version_spans = [VersionSpan(start=0, end=len(ids), policy_version=policy_version)]
        self.version_spans += [
            VersionSpan(start=start + s.start, end=start + s.end, policy_version=s.policy_version)
            for s in version_spans
        ]
        self._extend(ids, log_probs, sampled=True)
        text = self._tokenizer.decode([id for id in ids if id not in self._unspoken])
        if self._policy != "keep":
            self._context += self._tokenizer.decode(ids)
        self._turn_texts.append(text)
        self._call_ids = None
        self.messages.append({"role": "assistant", "content": text})
        self._history.append({"role": "assistant", "content": self._template.think_prefix + text})
        self._awaits_completion = False
        return text

    def parse_calls(self, text: str) -> list[ParsedCall]:
        """The tool calls in a turn's text; knows the tools, and whether the generation prompt opened the thinking."""
        calls = self._format.parse(text, think_open=self.think_open, tools=self.tools or None)
        if self._turn_texts and text == self._turn_texts[-1]:
            self._call_ids = [call.call_id for call in calls]
        return calls

    def render_observation(self, messages: Sequence[Message]) -> Observation:
        """The tokens of `messages` after the last turn: the end of turn if the policy did not sample it, separator,
        messages, generation prompt. Where they rewrite the context under the policy fork, all tokens of the new one.

        Raises ContextRewrittenError under the policy reject, EngineError if the chat template cannot render them.
        """
        if self._awaits_completion:
            raise ValueError("an observation follows a completion")
        with boundary(EngineError, "the observation could not be rendered"):
            added = self._with_call_ids(messages)
            rendered = self._appended(added) if self._policy == "keep" else self._followed(added)
            rendered.messages, rendered.added = list(messages), added
            return rendered

    def append_observation(self, messages: Sequence[Message], ids: Sequence[int]) -> None:
        """Appends `messages`, whose tokens `ids` came from `render_observation`, with mask 0. Starts a new stream if
        they rewrite the context."""
        if self._awaits_completion:
            raise ValueError("an observation follows a completion")
        if self._policy != "keep" and not isinstance(ids, Observation):
            raise ValueError(
                f"context policy {self._policy} needs the Observation that render_observation returned, got a "
                f"{type(ids).__name__}"
            )
        if isinstance(ids, Observation) and ids.messages == messages:
            added, escaped = ids.added, ids.escaped
        else:
            added = self._with_call_ids(messages)
            escaper = Escaper(self._tokenizer, self._format)
            escaper.messages(added)
            escaped = escaper.count
        if isinstance(ids, Observation) and ids.rewrites:
            self._said += self._appended(added)
            self.earlier_streams.append(
                TokenStream(
                    token_ids=self.token_ids,
                    prompt_tokens=self.prompt_tokens,
                    loss_mask=self.loss_mask,
                    rollout_log_probs=self.rollout_log_probs,
                    version_spans=self.version_spans,
                )
            )
            self._start_stream(ids)
            self._context = ids.text
        else:
            self._extend(ids, [0.0] * len(ids), sampled=False)
            if isinstance(ids, Observation):
                self._context += ids.text
        self.escaped_special_tokens += escaped
        self.messages.extend(safe(list(messages)))
        self._history.extend(added)
        self._awaits_completion = True

    def context_after(self, ids: Sequence[int]) -> int:
        """Tokens in the context once `ids` of `render_observation` are appended."""
        rewrites = isinstance(ids, Observation) and ids.rewrites
        return len(ids) if rewrites else len(self.token_ids) + len(ids)

    def record(self) -> dict[str, Any]:
        """What a trajectory says of its conversation, by the names of its fields."""
        names = ("token_ids", "prompt_tokens", "loss_mask", "rollout_log_probs", "version_spans")
        names = (*names, "earlier_streams", "escaped_special_tokens", "messages")
        return {name: getattr(self, name) for name in names}

    # --- texts for rewards ---

    def model_text(self) -> str:
        """What the policy wrote, one line break between turns: a reward on it cannot be earned by a tool's text."""
        return "\n".join(self._turn_texts)

    def full_text(self) -> str:
        """Everything after the prompt, observations included: what verl gives to reward functions."""
        return self._tokenizer.decode(self._said, skip_special=True)

    # --- small parts ---

    def _extend(self, ids: Sequence[int], log_probs: Sequence[float], *, sampled: bool) -> None:
        self.token_ids.extend(ids)
        self.loss_mask.extend([sampled] * len(ids))
        self.rollout_log_probs.extend(log_probs)
        self._said.extend(ids)

    def _appended(self, messages: Sequence[Message]) -> Observation:
        """What `messages` add to what is there."""
        escaper = Escaper(self._tokenizer, self._format)
        escaped = escaper.messages(messages)
        count = escaper.count
        end, text = self._template.added(escaped, self._schemas.escaped(escaper))
        text = self._unsampled(end) + text
        return Observation(escaper.encode(text), text=escaper.plain(text), escaped=count)

    def _followed(self, messages: Sequence[Message]) -> Observation:
        """What the template writes for the whole conversation: after what is there, or instead of it."""
        escaper = Escaper(self._tokenizer, self._format)
        escaped = escaper.messages(messages)
        count = escaper.count
        tools = self._schemas.escaped(escaper)
        end, _ = self._template.added(escaped, tools)
        whole = self._template.prompt(escaper.messages([*self._history, *messages]), tools)
        plain = escaper.plain(whole)
        context = self._context + self._unsampled(end)
        added = escaper.after(whole, len(self._context)) if plain.startswith(context) else None
        if added is not None:
            return Observation(escaper.encode(added), text=escaper.plain(added), escaped=count)
        if self._policy == "reject":
            raise ContextRewrittenError(_rewritten(context, plain))
        return Observation(escaper.encode(whole), text=plain, escaped=count, rewrites=True)

    def _unsampled(self, end: str) -> str:
        """The end of turn that the template writes, unless the policy sampled it or another one."""
        if not self.loss_mask[-1]:
            return end
        last = self.token_ids[-1]
        ended = last in self._turn_end_ids or last == self._tokenizer.token_id(end)
        return "" if ended else end

    def _with_call_ids(self, messages: Sequence[Message]) -> list[Message]:
        """Normal messages; tool results get the ids that the policy gave to its calls."""
        normal = normalise(messages)
        results = [message for message in normal if message.get("role") == "tool"]
        if results and self._turn_texts:
            if self._call_ids is None:
                self.parse_calls(self._turn_texts[-1])
            for message, call_id in zip(results, self._call_ids or (), strict=False):
                if call_id:
                    message.setdefault("tool_call_id", call_id)
        return normal


def _rewritten(context: str, whole: str) -> str:
    at = first_difference(context, whole)
    return (
        f"the chat template rewrites earlier turns: the policy saw {context[at : at + 40]!r} where the template now "
        f"writes {whole[at : at + 40]!r} (after {context[max(0, at - 30) : at]!r}); context policy keep leaves them "
        "as they were sampled, fork goes on in the rewritten context"
    )


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The first index at which two sequences differ; the length of the shorter one if it begins the other."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def demonstration(
    tokenizer: ChatTokenizer,
    tool_format: ToolFormat,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
) -> Conversation:
    """A conversation whose assistant turns were written by somebody else, as if the policy had sampled them.

    Its tokens are those that a rollout with the same turns would have (context policy keep), and loss_mask is True on
    each turn and its end of turn. Messages before the first assistant turn are the prompt. Log-probs are 0, the policy
    version is 0.
    """
    roles = [message.get("role") for message in messages]
    if "assistant" not in roles or roles[0] == "assistant" or roles[-1] != "assistant":
        raise ValueError(
            f"a demonstration starts with a question and ends with an assistant message, got roles {roles}"
        )
    return replay(tokenizer, tool_format, messages, tools)


def replay(
    tokenizer: ChatTokenizer,
    tool_format: ToolFormat,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
) -> Conversation:
    """`demonstration`, of messages that may end with tool results or a user too."""
    roles = [message.get("role") for message in messages]
    template = chat_template(tokenizer, tool_format)
    at = roles.index("assistant")
    conversation = Conversation(tokenizer, tool_format, messages[:at], tools)
    while at < len(messages):
        next_turn = next(
            (i for i in range(at + 1, len(roles)) if roles[i] == "assistant"), len(roles)
        )
        observation = messages[at + 1 : next_turn]
        if not observation and next_turn < len(messages):
            raise ValueError("a demonstration has two assistant messages in a row")
        end = tokenizer.turn_end_text or tokenizer.token_text(tokenizer.end_of_turn_id)
        if observation:
            end, _ = template.added(normalise(observation), conversation.tools or None)
        escaper = Escaper(tokenizer, tool_format)
        text = template.assistant_text(escaper.messages(normalise([messages[at]]))[0])
        ids = escaper.encode(text.removeprefix(template.think_prefix) + end)
        conversation.append_completion(ids, [0.0] * len(ids), policy_version=0)
        if observation:
            ids = conversation.render_observation(observation)
            conversation.append_observation(observation, ids)
        at = next_turn
    return conversation
