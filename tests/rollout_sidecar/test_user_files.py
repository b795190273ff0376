"""Users' YAML and JSON: found beside the file that names them, and strict where the libraries shrug."""

from pathlib import Path

import pytest

from rollout_sidecar.user_files import find_file, find_path, read_json, read_yaml


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a: 1\nb:\n  x: 1\n  y: 2\n  x: 3\n", r"f.yaml:5: the key 'x' is there twice; keep one"),
        ("a: 1\na: 2\n", r"f.yaml:2: the key 'a' is there twice"),
        ("- {k: 1, k: 1}\n", r"f.yaml:1: the key 'k' is there twice"),
        ("a: [", r"f.yaml is not valid YAML: while parsing"),
        ("a: 2020-13-45", r"f.yaml is not valid YAML: month must be in 1..12"),
        ("a: !!python/object:os.system x", r"f.yaml is not valid YAML: could not determine"),
        (b"a: \xff", r"f.yaml is not valid YAML: it is not UTF-8 text"),
    ],
)
def test_a_fault_of_a_yaml_file_is_a_sentence_with_its_place(tmp_path, content, problem):
    with pytest.raises(ValueError, match=problem):
        read_yaml(written(tmp_path / "f.yaml", content))


def test_a_merged_key_may_be_set_anew(tmp_path):
    file = written(
        tmp_path / "f.yaml",
        "p: {a: &x {<<: &w {k: 0, j: 1}, k: 1}}\nb: {<<: *w, j: 2}\n",
    )
    assert read_yaml(file) == {"p": {"a": {"k": 1, "j": 1}}, "b": {"k": 0, "j": 2}}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"a": 1, "b": {"x": 1, "x": 2}}', "f.json: the key 'x' is there twice"),
        ("{", "f.json is not valid JSON: Expecting property name"),
        ("[" * 100_000, "f.json is not valid JSON: maximum recursion"),
        (b"\xff", "f.json is not valid JSON: it is not UTF-8 text"),
    ],
)
def test_a_fault_of_a_json_file_is_a_sentence(tmp_path, content, problem):
    with pytest.raises(ValueError, match=problem):
        read_json(written(tmp_path / "f.json", content))


def test_a_file_is_sought_beside_the_one_that_names_it_and_then_from_the_working_folder(
    tmp_path, monkeypatch
):
    folder = tmp_path / "configs"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=rf"here: x: no such file \(looked in {folder} and {tmp_path}"
    ):
        find_file("x", folder, "here")
    assert find_path("x", folder) is None
    written(tmp_path / "x", "")
    assert find_file("x", folder, "here") == Path("x") == find_path("x", folder)
    written(folder / "x", "")
    assert find_file("x", folder, "here") == folder / "x" == find_path("x", folder)
    with pytest.raises(ValueError, match="here: /no/where: no such file$"):
        find_file("/no/where", folder, "here")
