"""Tools of MCP servers (Model Context Protocol), over stdio, streamable HTTP and SSE."""

from rollout_sidecar.tools.mcp.tools import McpTool, open_mcp_tools

__all__ = ["McpTool", "open_mcp_tools"]
