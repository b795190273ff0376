"""docs/many_hosts.md and the files in configs/launch say what is there: commands, settings, links; the processes that
they start find each other."""

import re
import shlex
import subprocess

import pytest
import yaml
from docs_pages import ROOT, check_command, commands, read, wrong_names

from tooljax.config.schema import MeshConfig
from tooljax.distributed import Place, place_of

LAUNCH = ROOT / "configs" / "launch"
SCRIPTS = ("tpu_slice.sh", "slurm.sbatch")
AUTO = MeshConfig(coordinator="auto")


def text_of(name: str) -> str:
    return (LAUNCH / name).read_text(encoding="utf-8")


def trainers(name: str) -> list[str]:
    """The commands in a script that start a trainer."""
    joined = text_of(name).replace("\\\n", " ")
    return [
        match.group() for match in re.finditer(r"python -m tooljax\.train [^\n&]*[^\n&\"]", joined)
    ]


def jobset() -> dict:
    return yaml.safe_load(text_of("jobset.yaml"))


def test_the_page_names_what_is_there():
    page = read("many_hosts.md")
    assert list(wrong_names(page)) == []
    assert len(commands(page)) == 2
    for command in commands(page):
        check_command(command)
    assert {f"../configs/launch/{file.name}" for file in LAUNCH.iterdir()} == set(
        re.findall(r"\]\((\.\./configs/launch/[^)]+)\)", page)
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_start_a_trainer_that_looks_for_the_others(name):
    subprocess.run(["bash", "-n", LAUNCH / name], check=True)
    (command,) = trainers(name)
    check_command(command)
    assert "mesh.coordinator=auto" in shlex.split(command)
    assert "ot run yet" in text_of(name)


def test_slurm_starts_one_process_a_node():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text_of("slurm.sbatch"), re.M))
    assert options["ntasks-per-node"] == "1"
    assert options["signal"] == "TERM@180"  # to the job's steps, not to the script
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_NTASKS": options["nodes"],
        "SLURM_PROCID": "1",
    }
    assert place_of(AUTO, environment) == Place("node1:61447", 2, 1)


def test_the_pods_of_the_jobset_find_the_first():
    whole = jobset()
    (replicated,) = whole["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    check_command(shlex.join(container["command"]))
    environment = {each["name"]: each["value"] for each in container["env"]}
    last = job["completions"] - 1
    place = place_of(AUTO, environment | {"JOB_COMPLETION_INDEX": str(last)})
    # JobSet names a pod <set>-<job>-<index of the job>-<index of the pod>, in a domain of the set's name.
    name, port = whole["metadata"]["name"], container["ports"][0]["containerPort"]
    first = f"{name}-{replicated['name']}-0-0.{name}:{port}"
    assert place == Place(first, job["parallelism"], last)
    assert job["completionMode"] == "Indexed"
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}
