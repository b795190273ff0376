"""docs/deployment.md says what is there: its flags, settings, files and metrics exist, and its certificates are
trusted."""

import re
import shlex
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from rollout_sidecar.arguments import parser
from tooljax.config import load_config
from tooljax.config.gin import SECTIONS
from tooljax.metrics import REGISTRY

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if "python -m" in line
]


def arguments(command: str, module: str) -> list[str]:
    words = shlex.split(command.rstrip("& "))
    return words[words.index(module) + 1 :]


def test_there_are_commands_of_both_sides():
    assert sum("rollout_sidecar" in command for command in COMMANDS) >= 3
    assert sum("tooljax.train" in command for command in COMMANDS) >= 2


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-m rollout_sidecar" in c])
def test_the_sidecar_takes_its_commands(command):
    parser().parse_args(arguments(command, "rollout_sidecar"))


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-m tooljax.train" in c])
def test_the_trainer_takes_its_settings(command):
    words = arguments(command, "tooljax.train")
    load_config([], [words[i + 1] for i, word in enumerate(words) if word == "--set"])


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"`(--[a-z0-9_]+)`", PAGE))))
def test_every_flag_is_the_sidecars_or_the_trainers(flag):
    assert flag in parser().format_help() or flag == "--dry_run"


def test_every_setting_and_metric_is_there():
    sections = "|".join(SECTIONS)
    settings = set(re.findall(rf"`((?:{sections})\.[a-z0-9_]+)(?: = [^`]*)?`", PAGE))
    assert len(settings) >= 10
    for setting in settings:
        section, field = setting.split(".")
        assert field in SECTIONS[section], setting
    names = set(re.findall(r"`((?:fleet|weights|gate|policy)/[a-z0-9_/]+)`", PAGE))
    assert len(names) >= 15
    assert names <= set(REGISTRY)


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:configs|benchmarks)/[\w./]+)`", PAGE)))
)
def test_every_file_is_there(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("name", ["two_gpus", "tpu"])
def test_commands_in_the_heads_of_configs_are_taken(name):
    text = (ROOT / "configs" / f"arithmetic_smollm2_{name}.gin").read_text(encoding="utf-8")
    head = re.sub(r"\\\n# *", " ", text)
    (sidecar,) = re.findall(r"^#.*-m rollout_sidecar (.*)$", head, re.MULTILINE)
    assert parser().parse_args(shlex.split(sidecar.rstrip("& "))).engine == "sglang"
    assert "not run yet" in text


def test_certificates_are_made_as_it_says(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    (block,) = re.findall(r"```bash\n(mkdir.*?)```", PAGE, re.DOTALL)
    subprocess.run(["bash", "-ec", block], cwd=tmp_path, check=True, capture_output=True)
    made = tmp_path / "secrets"
    trust = ssl.create_default_context(cafile=str(made / "ca.pem"))
    assert len(trust.get_ca_certs()) >= 2
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made / "gpu-a.pem", made / "gpu-a.key")
    shake(trust, server, "gpu-a")
    with pytest.raises(ssl.SSLCertVerificationError, match="gpu-b"):
        shake(trust, server, "gpu-b")
    assert (made / "token").stat().st_mode & 0o077 == 0


def shake(trust: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    """A TLS handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        trust.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
