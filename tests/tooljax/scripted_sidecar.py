"""A real sidecar for the trainer's tests: a tokenizer small enough to make here, and an engine that plays a script."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollout_sidecar.agent import Agent
from rollout_sidecar.engines.base import WeightTensor
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.formats import get_format
from rollout_sidecar.server import ServerOptions, Sidecar, create_app
from rollout_sidecar.tokenizer import ChatTokenizer

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> Path:
    """A model folder that holds a tokenizer of bytes and a ChatML template, and no model."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class KeepingEngine(ScriptedEngine):
    """Keeps the bytes of the weights it is given; can be told to refuse them, or to wait before it takes them."""

    def __init__(self, tokenizer: ChatTokenizer):
        super().__init__(tokenizer, ["#### 2"])
        self.weights: dict[str, bytes] = {}
        self.pushes = 0
        self.refuse = False

    async def load_weights(
        self,
        tensors: Mapping[str, WeightTensor],
        policy_version: int,
        changed: frozenset[str] | None = None,
    ) -> None:
        if self.refuse:
            raise ValueError("the head does not fit")
        self.weights = {name: bytes(tensor.data) for name, tensor in tensors.items()}
        self.pushes += 1
        await super().load_weights(tensors, policy_version)


@asynccontextmanager
async def serving(engine: ScriptedEngine, tokenizer: ChatTokenizer) -> AsyncIterator[str]:
    """Serves the engine on a free port of this machine; gives the URL."""
    agent = Agent(engine=engine, tokenizer=tokenizer, tool_format=get_format("hermes"))
    sidecar = Sidecar(agent, ServerOptions())
    runner = web.AppRunner(create_app(sidecar), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await sidecar.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await sidecar.stop()
        await runner.cleanup()
