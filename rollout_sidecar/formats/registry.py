"""Every tool-call format, by its name and by the names that verl, SGLang and vLLM have for it."""

from rollout_sidecar.formats.base import ToolFormat
from rollout_sidecar.formats.gemma import FUNCTION_GEMMA, GEMMA_4
from rollout_sidecar.formats.glm import GLM_45, GLM_47
from rollout_sidecar.formats.harmony import HARMONY
from rollout_sidecar.formats.hermes import HermesFormat
from rollout_sidecar.formats.llama import LLAMA_3_JSON
from rollout_sidecar.formats.minimax import MINIMAX_M1
from rollout_sidecar.formats.mistral import MISTRAL, MISTRAL_V3
from rollout_sidecar.formats.pythonic import GEMMA_3, PYTHONIC
from rollout_sidecar.formats.sections import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2
from rollout_sidecar.formats.tagged import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
)

# In the order in which a template is asked whether it writes them: the most telling markers first, the two formats
# without any last.
FORMATS: tuple[ToolFormat, ...] = (
    HARMONY,
    KIMI_K2,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    DEEPSEEK_V31,
    DEEPSEEK_V3,
    MISTRAL,
    MISTRAL_V3,
    MINIMAX_M2,
    MINIMAX_M1,
    SEED_OSS,
    GEMMA_4,
    FUNCTION_GEMMA,
    GEMMA_3,
    QWEN3_CODER,
    GLM_45,
    GLM_47,
    HERMES := HermesFormat(),
    LLAMA_3_JSON,
    PYTHONIC,
)

UNMARKED: tuple[ToolFormat, ...] = (LLAMA_3_JSON, PYTHONIC)

_BY_NAME = {tool_format.name: tool_format for tool_format in FORMATS}

_ALIASES = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "glm": "glm45",
    "gpt-oss": "harmony",
    "gpt_oss": "harmony",
    "kimi": "kimi_k2",
    "llama3": "llama3_json",
    "llama4_pythonic": "pythonic",
    "minimax": "minimax_m2",
    "minimax-m2": "minimax_m2",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "seed": "seed_oss",
}


def format_names() -> list[str]:
    """The names that `get_format` takes, other tools' names for them left out."""
    return sorted(_BY_NAME)


def get_format(name: str) -> ToolFormat:
    """The format of that name. Raises ValueError if there is none."""
    found = _BY_NAME.get(_ALIASES.get(name, name))
    if found is None:
        raise ValueError(f"unknown tool format {name!r}; there are: {', '.join(format_names())}")
    return found
