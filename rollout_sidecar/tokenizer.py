"""Text to token ids and back for one model folder: tokenizer.json, the chat template, and the tokens that end a turn.

Reads the files that `transformers` reads and renders templates as it does (same Jinja environment, same filters), but
needs only `tokenizers` and `jinja2`. Where `transformers` offers the wall clock to templates, this offers a fixed date:
the same conversation has the same tokens tomorrow.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

FIXED_NOW = datetime(2024, 7, 26)
"""What `strftime_now` shows to templates; the date that Llama 3.1's template itself falls back to."""

SENTINEL = "tooljaxSentinel"
"""Stands for an assistant's content where only the text around it is wanted."""

KEPT_TEXTS, MAX_KEPT_CHARACTERS = 512, 2**14
"""So many texts, and none longer, are kept with their ids: encoding is most of what a turn costs."""

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class ChatTokenizer:
    """A tokenizer with a chat template. Immutable; may be shared by many conversations."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, str],
        *,
        named_tokens: Mapping[str, str],
        eos_ids: Iterable[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        source: str = "this tokenizer",
    ):
        """Use `from_folder`, unless the parts are at hand.

        Args:
            tokenizer: its truncation, padding and special-token post-processing are not used.
            templates: "default", and optionally "tool_use", which renders conversations that have tools.
            named_tokens: bos_token, eos_token, ...: variables of the template.
            eos_ids: ids that end a generation, beside eos_token and the template's own end of turn.
            template_kwargs: more variables of the template, such as enable_thinking.
            source: what error messages call this tokenizer.
        """
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._variables = {**named_tokens, **(template_kwargs or {})}
        self.source = source
        """What error messages call this tokenizer."""
        self._templates = {
            name: _compile(text, f"the chat template {name!r} of {source}")
            for name, text in templates.items()
        }
        self._added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in self._added.items() if token.special)
        """Ids that the tokenizer calls special."""
        sources = "\n".join(templates.values())
        self.control_ids = self.special_ids | {
            id for id, token in self._added.items() if _is_markup(token.content, sources)
        }
        """Ids whose text can only come from the template or from sampling, never from a tool: special ones, and other
        tokens that conversations are framed with (`<tool_response>` of Qwen3, `<｜User｜>` of DeepSeek)."""
        self._vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values()) + 1
        """One more than the highest id. A model may have more rows, for padding."""

        eos_id = self._vocab.get(named_tokens.get("eos_token", ""))
        self.turn_end_text, turn_end_id = self._find_turn_end()
        if turn_end_id is None and eos_id is None:
            raise ValueError(
                f"{source} has no token that ends a turn: its template writes none after the assistant's content, "
                "and eos_token is not set (set eos_token in tokenizer_config.json)"
            )
        self.end_of_turn_id: int = turn_end_id if turn_end_id is not None else eos_id  # type: ignore
        """The token that the template writes after an assistant's content; eos_token if it writes none."""
        self.stop_ids = frozenset(
            {*eos_ids, self.end_of_turn_id} | ({eos_id} if eos_id is not None else set())
        )
        """Every id that ends a generation."""

    @classmethod
    def from_folder(
        cls, path: str | Path, *, template_kwargs: Mapping[str, Any] | None = None
    ) -> "ChatTokenizer":
        """Reads a Hugging Face model folder: tokenizer.json, tokenizer_config.json, chat_template.jinja, and the
        end-of-sequence ids of generation_config.json and config.json."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{folder} has no tokenizer.json (a slow tokenizer is converted by transformers: "
                f"AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        config = _read_json(folder / "tokenizer_config.json")
        tokens = {**_read_json(folder / "special_tokens_map.json"), **config}
        named = {name: _token_text(tokens.get(name)) for name in _TOKEN_NAMES}
        eos_ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            eos = _read_json(folder / name).get("eos_token_id")
            eos_ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
        return cls(
            _read_tokenizer(file),
            _read_templates(folder, config),
            named_tokens={name: text for name, text in named.items() if text is not None},
            eos_ids=eos_ids,
            template_kwargs=template_kwargs,
            source=str(folder),
        )

    @cached_property
    def vocab_hash(self) -> str:
        """Hash of every (id, token): equal for two tokenizers exactly if ids mean the same to both."""
        digest = hashlib.sha256()
        for token, id in sorted(self._vocab.items(), key=lambda item: item[1]):
            digest.update(f"{id}\t{token}\n".encode())
        return digest.hexdigest()[:32]

    @cached_property
    def _plain(self) -> Tokenizer:
        # A second copy, because encode_special_tokens is a switch on the tokenizer and encoding may run in threads.
        # Control tokens that are not special do not obey it. They are renamed, not removed: ids go by position.
        parts = self._tokenizer.to_str()
        others = self.control_ids - self.special_ids
        if others:
            parsed = json.loads(parts)
            for token in parsed["added_tokens"]:
                if token["id"] in others:
                    token["content"] = f"\U0010fffd{token['id']}\U0010fffd"
            parts = json.dumps(parsed, ensure_ascii=False)
        plain = Tokenizer.from_str(parts)
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches the text of any special token, the longest first."""
        return _longest_first(self._added[id].content for id in self.special_ids)

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches the text of any control token, the longest first."""
        return _longest_first(self._added[id].content for id in self.control_ids)

    def lacks_control(self, text: str) -> bool:
        """Whether it is clear at a glance that `text` holds no control token, not even a hidden one."""
        return not self._normalises and not any(start in text for start in self._control_starts)

    @cached_property
    def _control_starts(self) -> tuple[str, ...]:
        """The first characters of the texts of control tokens."""
        return tuple({self._added[id].content[:1] for id in self.control_ids})

    def hides_control(self, text: str) -> bool:
        """Whether a control token appears only once the tokenizer has normalised the text: `<|IM_END|>` lower-cased."""
        if not self._normalises:
            return False
        rest = self.control_pattern.sub("\0", text)
        return bool(self._normalised_pattern.search(self._tokenizer.normalizer.normalize_str(rest)))

    @cached_property
    def _normalises(self) -> bool:
        has_normalizer = self._tokenizer.normalizer is not None
        return has_normalizer and any(self._added[id].normalized for id in self.control_ids)

    @cached_property
    def _normalised_pattern(self) -> re.Pattern[str]:
        texts = {self._added[id].content for id in self.control_ids if self._added[id].normalized}
        return _longest_first(map(self._tokenizer.normalizer.normalize_str, texts))

    def encode(self, text: str, *, plain: bool = False) -> list[int]:
        """Token ids of `text`; nothing is added. With `plain`, texts of control tokens become ordinary tokens."""
        if len(text) > MAX_KEPT_CHARACTERS:
            return self._encode(text, plain)
        return list(self._kept(text, plain))

    @cached_property
    def _kept(self) -> Callable[[str, bool], list[int]]:
        # The samples of a group begin with the same prompt, and many tools have few answers.
        return lru_cache(maxsize=KEPT_TEXTS)(self._encode)

    def _encode(self, text: str, plain: bool) -> list[int]:
        if not plain:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if self.control_ids.isdisjoint(ids):
            return ids
        # The vocabulary itself holds the text, and the model found it: it cannot find it in single characters.
        pieces: list[str] = []
        position = 0
        for match in self.control_pattern.finditer(text):
            pieces += [text[position : match.start()], *match.group()]
            position = match.end()
        pieces += [text[position:]] if position else list(text)
        encoded = [self._plain.encode(piece, add_special_tokens=False).ids for piece in pieces]
        return [id for ids in encoded for id in ids]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`. Ids beyond the vocabulary (a model's padding rows) have no text."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def token_text(self, id: int) -> str:
        """The text of one id as people write it: "<|im_end|>", "\\n". "" for ids beyond the vocabulary."""
        return self._tokenizer.decode([id], skip_special_tokens=False)

    def leading_control(self, text: str) -> str:
        """The control token that `text` begins with, as text; "" if it begins with none."""
        found = self.control_pattern.match(text)
        return found.group() if found else ""

    def token_id(self, text: str) -> int | None:
        """The id of one token by its text, None if there is no such token."""
        return self._vocab.get(text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text of a conversation. Raises ValueError when the template rejects it."""
        template = self._templates.get("tool_use" if tools else "default")
        template = template or self._templates["default"]
        try:
            return template.render(
                **self._variables,
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"the chat template of {self.source} cannot render messages with roles [{roles}]: {error}"
            ) from error

    def _find_turn_end(self) -> tuple[str, int | None]:
        """Text and id of what closes an assistant message: everything after its content up to an added token."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL}]
        text = self.render(messages, add_generation_prompt=False)
        if SENTINEL not in text:
            raise ValueError(
                f"the chat template of {self.source} does not print assistant messages"
            )
        encoding = self._tokenizer.encode(text.rpartition(SENTINEL)[2], add_special_tokens=False)
        for id, (_, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if id in self._added:
                return text.rpartition(SENTINEL)[2][:end], id
        return "", None


def _is_markup(text: str, template_sources: str) -> bool:
    """Whether a token frames conversations: `<|...|>`, or something in brackets that a template writes. Runs of spaces,
    words and HTML tags, which some tokenizers list beside such tokens, do not."""
    if text[:1].isalnum() or text[-1:].isalnum() or not any(map(str.isalnum, text)):
        return False
    return bool(re.fullmatch(r"<[|｜].*[|｜]>", text)) or text in template_sources


def _longest_first(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, of several at one place the longest."""
    ordered = sorted({*texts} - {""}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def normalise_stop(ids: Sequence[int], stop_id: int) -> list[int]:
    """The ids of a turn that stopped at `stop_id`, ending in it exactly once: some engines keep the matched id, some
    strip it, some report it twice."""
    end = len(ids)
    while end and ids[end - 1] == stop_id:
        end -= 1
    return [*ids[:end], stop_id]


# --- files ------------------------------------------------------------------------------------------------------


def _read_tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(
            f"{file} is not a readable tokenizer: {error}; download it again"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, expected an object")
    return value


def _token_text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates by name. A chat_template.jinja beats the one in tokenizer_config.json, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    elif isinstance(found, str):
        found = {"default": found}
    if not found or "default" not in found:
        raise ValueError(
            f"{folder} has no chat template: neither chat_template.jinja nor a default chat_template in "
            "tokenizer_config.json. Base models have none: use the instruct model, or copy chat_template.jinja from it"
        )
    return found


# --- Jinja ------------------------------------------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for transformers; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Templates come with downloaded models."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.role`: what Jinja's own makes of it, without the detour of an exception."""
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        try:
            return obj[attribute]
        except KeyError:
            return self.undefined(obj=obj, name=attribute)


_DICT_ATTRIBUTES = frozenset(dir(dict))


def _compile(text: str, what: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = FIXED_NOW.strftime
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{what} is not valid Jinja: line {error.lineno}: {error}") from error
