#!/usr/bin/env bash
# Installs MCP servers that others wrote, each in an environment of its own, for the tests that start them (300 MB):
#   time/        mcp-server-time (Python, MCP SDK 2.x)
#   sqlite/      mcp-server-sqlite (Python, MCP SDK 1.x: it does not start with 2.x)
#   calculator/  mcp-server-calculator (Python, MCP SDK 1.x)
#   node/        @modelcontextprotocol/server-everything and server-filesystem (needs npm)
# and env.sh, which tells the tests where they are. What the package index does not have is left out, with a word.
#
#   tests/tools/make_mcp_servers.sh [FOLDER] [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=${1:-build/test-mcp}
python=${2:-python3}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

# A folder is there only if all of it is.
make_venv() {
    local name=$1
    shift
    rm -rf "${folder:?}/$name"
    "$python" -m venv "$folder/$name" &&
        "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@" ||
        { rm -rf "${folder:?}/$name" && return 1; }
}

make_node() {
    rm -rf "$folder/node"
    command -v npm >/dev/null && mkdir "$folder/node" && echo '{"private": true}' >"$folder/node/package.json" &&
        npm install --silent --no-audit --no-fund --prefix "$folder/node" \
            @modelcontextprotocol/server-everything@2026.8.31 @modelcontextprotocol/server-filesystem@2026.8.31 \
            >/dev/null ||
        { rm -rf "$folder/node" && return 1; }
}

left_out() {
    echo "not made: $1" >&2
}

[ -x "$folder/time/bin/mcp-server-time" ] || make_venv time mcp-server-time==2026.10.19 'mcp>=2,<3' ||
    left_out "time (is mcp-server-time in the package index?)"
[ -x "$folder/sqlite/bin/mcp-server-sqlite" ] || make_venv sqlite mcp-server-sqlite==2025.4.25 'mcp<2' ||
    left_out "sqlite (is mcp-server-sqlite in the package index?)"
[ -x "$folder/calculator/bin/mcp-server-calculator" ] || make_venv calculator 'mcp-server-calculator<0.3' 'mcp<2' ||
    left_out "calculator (is mcp-server-calculator in the package index?)"
[ -d "$folder/node/node_modules/@modelcontextprotocol/server-filesystem" ] || make_node ||
    left_out "node (it takes npm, and two packages of @modelcontextprotocol)"
echo "export TOOLJAX_TEST_MCP='$folder'" >"$folder/env.sh"
cat "$folder/env.sh"
